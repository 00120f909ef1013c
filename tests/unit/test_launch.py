"""What `hexi launch` prints: flags that state the model, and a start of torchrun for each run of ranks."""

import dataclasses
import json

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import constant_flags, model_flags, presets
from megatron_hexi.cost.megatron_arguments import model_from_arguments
from megatron_hexi.plan import JobTerms, Workload, proportional_plan, write_plan
from megatron_hexi.report.launch import find_agents, megatron_flags
from tests.support.shell import call_hexi

CLUSTER = """\
name: mixed
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 3, count: 2}
- {name: slow, gpu: A100-SXM-80GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""


@pytest.mark.parametrize("name", presets())
def test_flags_of_a_model_are_read_as_that_model(name, tmp_path):
    model = presets()[name]
    read = model_from_arguments(" ".join(model_flags(model, 4096)), tmp_path / "job.args")
    assert dataclasses.replace(read, name=model.name, source=model.source) == model


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({}, "--norm-epsilon 1e-05 --rotary-base 500000"),
        ({"rope_scaling": LLAMA_3_1}, "--norm-epsilon 1e-05 --rotary-base 500000 --use-rope-scaling"),
        ({"model_type": "qwen2"}, "--norm-epsilon 1e-05 --rotary-base 500000 --add-qkv-bias"),
        ({"model_type": "gpt2", "layer_norm_epsilon": 1e-6}, "--norm-epsilon 1e-06"),
    ],
)
def test_constants_of_a_config_are_flags(tmp_path, change, flags):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "n_layer": 2, "n_embd": 64, "n_head": 4, **change}))
    assert constant_flags(path) == flags.split()


def test_constants_without_a_flag_are_named(tmp_path, monkeypatch, capsys):
    """Llama 3.2's factor: Megatron would build the model with 8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    config = {**LLAMA, "rope_scaling": {**LLAMA_3_1, "factor": 32.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_plan(proportional_plan(Workload(64, 4, 4, 16), [[[1] * 7]]), tmp_path / "plan.yaml")
    words = "launch plan.yaml --cluster cluster.yaml --model config.json"
    said = call_hexi(monkeypatch, capsys, words.split())
    assert said.code == 0
    assert "config.json: rope_scaling.factor = 32.0: Megatron's --use-rope-scaling has 8.0" in said.err
    assert "--use-rope-scaling" not in said.out


def test_each_run_of_ranks_on_a_node_is_one_start(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1] * 5]])
    plan = dataclasses.replace(plan, gpus=(3, 4, 6, 0, 5))
    agents = find_agents(plan, read_cluster(tmp_path / "cluster.yaml"))
    found = [(agent.node, agent.gpus, agent.first_rank, agent.whole) for agent in agents]
    assert found == [
        ("fast-1", (0, 1), 0, False),
        ("slow", (0,), 2, True),
        ("fast-0", (0,), 3, False),
        ("fast-1", (2,), 4, False),
    ]


def test_what_the_plan_sets_is_not_typed_and_own_flags_stand():
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]])
    plan = dataclasses.replace(plan, job=JobTerms(precision="bf16"))
    given = [
        "--num-layers",
        "2",
        "--bf16",
        "--tensor-model-parallel-size",
        "2",
        "--seq-length",
        "128",
        "--lr",
        "1",
    ]
    flags = megatron_flags(given, ["--lr", "2", "--data-path", "text"], plan, "plan.yaml")
    assert flags[:6] == ("--hexi-plan", "plan.yaml", "--num-layers", "2", "--seq-length", "64")
    assert flags[-4:] == ("--lr", "2", "--data-path", "text")
    assert not {"--bf16", "--tensor-model-parallel-size", "--mock-data"} & set(flags)


def test_an_error_is_a_document_with_json(monkeypatch, capsys):
    code, out, err = call_hexi(monkeypatch, capsys, ["show", "absent.yaml", "--json"])
    assert code == 2
    assert '"exit_code": 2' in out
    assert err.startswith("hexi: error: absent.yaml")


def test_a_kernel_that_the_shipped_image_lacks_is_not_asked_for():
    """Training takes the plan's where it is installed, and warns where it is not."""
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]])
    kernels = {"H100-SXM-80GB": "flash-attn-3", "A100-SXM-80GB": "flash-attn-2"}
    flags = megatron_flags([], [], dataclasses.replace(plan, job=JobTerms(kernel=kernels)), "plan.yaml")
    assert flags[2:4] == ("--hexi-kernel", "A100-SXM-80GB=flash-attn-2")
    only = dataclasses.replace(plan, job=JobTerms(kernel={"H100-SXM-80GB": "flash-attn-3"}))
    assert "--hexi-kernel" not in megatron_flags([], [], only, "plan.yaml")
