"""What `hexi launch` prints: flags that state the model, and a start of torchrun for each run of ranks."""

import dataclasses
import json
import re

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import assumed_kernels
from megatron_hexi.errors import HexiError
from megatron_hexi.models import constant_flags, model_flags, presets
from megatron_hexi.models.megatron_arguments import model_from_arguments
from megatron_hexi.models.named_models import preset_problems
from megatron_hexi.plan import JobTerms, Workload, proportional_plan, write_plan
from megatron_hexi.report.launch_lines import find_agents, launch_lines, launch_text, megatron_flags
from megatron_hexi.report.planned import assumption_lines
from megatron_hexi.shell.words import unplaced
from tests.support.shell import call_hexi

CLUSTER = """\
name: mixed
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 3, count: 2}
- {name: slow, gpu: A100-SXM-80GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""


@pytest.mark.parametrize("name", sorted(presets().keys() - preset_problems().keys()))
def test_flags_of_a_model_are_read_as_that_model(name, tmp_path):
    model = presets()[name]
    scores = ("--moe-router-score-function", "sigmoid")  # among a preset's constants
    read = model_from_arguments(unplaced((*model_flags(model, 4096), *scores)), tmp_path / "job.args")
    assert read.norm_params(1) == model.norm_params(1)  # which None says, too, where biases are as elsewhere
    read = dataclasses.replace(read, norm_biases=model.norm_biases)
    assert dataclasses.replace(read, name=model.name, source=model.source, vision=model.vision) == model


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
        ({"initializer_range": 0.01}, "--norm-epsilon 1e-05 --init-method-std 0.01 --rotary-base 500000"),
    ],
)
def test_constants_of_a_config_are_flags(tmp_path, change, flags):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    assert constant_flags(path) == flags.split()


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({"layer_norm_epsilon": 1e-6}, "--norm-epsilon 1e-06"),
        ({"activation_function": "gelu"}, "--norm-epsilon 1e-05 --no-bias-gelu-fusion"),
    ],
)
def test_constants_of_a_gpt2_are_flags(tmp_path, change, flags):
    path = tmp_path / "config.json"
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
    path.write_text(json.dumps({**sizes, **change}))
    assert constant_flags(path) == flags.split()


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A folder with a plan for two ranks of a small Llama, and its cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    write_plan(proportional_plan(Workload(64, 4, 4, 16), [[[1] * 7]]), tmp_path / "plan.yaml")
    return tmp_path


LAUNCH = "launch plan.yaml --cluster cluster.yaml --model config.json -o job.args"


def test_lines_state_yarn_once(planned, monkeypatch, capsys):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    (planned / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": scaling}))
    assert call_hexi(monkeypatch, capsys, LAUNCH.split()).code == 0
    flags = (planned / "job.args").read_text()
    assert flags.count("--position-embedding-type") == 1
    assert "--position-embedding-type yarn\n--rotary-scaling-factor 4.0\n" in flags
    assert "--rotary-base 500000\n" in flags


def test_biases_are_flags(planned, monkeypatch, capsys):
    (planned / "config.json").write_text(json.dumps({**LLAMA, "attention_bias": True, "mlp_bias": True}))
    assert call_hexi(monkeypatch, capsys, LAUNCH.split()).code == 0
    flags = (planned / "job.args").read_text()
    assert "--disable-bias-linear" not in flags
    assert "--normalization RMSNorm\n" in flags


def test_a_constant_without_a_flag_means_no_lines(planned, monkeypatch, capsys):
    """Llama 3.2's factor: Megatron would build the model with 8."""
    config = {**LLAMA, "rope_scaling": {**LLAMA_3_1, "factor": 32.0}}
    (planned / "config.json").write_text(json.dumps(config))
    said = call_hexi(monkeypatch, capsys, LAUNCH.split())
    assert said.code == 2
    assert "config.json: rope_scaling.factor = 32.0: Megatron's --use-rope-scaling has 8.0" in said.err
    assert not (planned / "job.args").exists()
    words = "plan cluster.yaml --model config.json --seq-length 64 -o new.yaml --json"
    said = call_hexi(monkeypatch, capsys, words.split())
    assert said.code == 0
    assert "note: no lines that start the training: config.json: rope_scaling.factor = 32.0" in said.err
    assert json.loads(said.out)["launch"] is None
    assert (planned / "new.yaml").exists()


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


_MODEL = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--micro-batch-size", "1"]


def _typed(plan, *given: str) -> tuple[str, ...]:
    return megatron_flags([*_MODEL, *given], [], plan, "plan.yaml")


def test_a_plan_that_its_job_repeats_keeps_the_job_s_stages_unless_it_states_them():
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]])
    assert "--pipeline-model-parallel-size" in _typed(plan, "--pipeline-model-parallel-size", "2")
    stated = dataclasses.replace(plan, job=JobTerms(pipeline_parallel=2))
    virtual = ("--pipeline-model-parallel-size", "1", "--num-layers-per-virtual-pipeline-stage", "1")
    assert not {"--pipeline-model-parallel-size", *virtual[::2]} & set(_typed(stated, *virtual))


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", "--train-iters 10"),
        ("--train-iters 5", ""),
        ("--train-samples 1600", ""),
        ("--lr-warmup-samples 3 --global-batch-size 4", "--train-samples 40"),
        ("--lr-warmup-iters 500", "--lr-decay-iters 510 --train-iters 10"),
        ("--save runs", "--save-interval 500 --train-iters 10"),
    ],
)
def test_lines_state_how_long_to_train(given, added):
    typed = " ".join(_typed(proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]]), *given.split()))
    said = typed.partition("--log-interval 1")[2].split()
    assert " ".join(said) == added


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "--use-kitchen-attention",
            "--use-kitchen-attention does not work with --hexi-plan: a plan brings its own",
        ),
        ("--fp4-format e2m1", "--fp4-format does not work with --hexi-plan"),
        ("--hidden-size 128 --kv-channels 32", "workload.head_dim is 16, but the job has --kv-channels 32"),
        ("--num-attention-heads 8", "workload.heads is 4, but the job has --num-attention-heads 8"),
        ("--check-for-spiky-loss", "--check-for-spiky-loss does not work with megatron_hexi.pretrain_gpt"),
        (
            "--train-iters 5 --lr-warmup-samples 3",
            "--train-iters does not work with --train-samples or --lr-decay-samples or --lr-warmup-samples",
        ),
        ("--learning-rate 3", "--learning-rate: Megatron 0.17 to 0.19 has no such argument"),
    ],
)
def test_lines_that_would_not_start_are_refused(given, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        _typed(proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]]), *given.split())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "--sft --no-rope-fusion --fp4-format e2m1",
            r"^2 mistakes: .* unequal replicas, or stages .*: .*--no-unequal-stages .*--fp4-format does",
        ),
        ("--num-experts 4", r"does not work with unequal replicas .*; give the stages layers: \[0, L\]"),
    ],
)
def test_what_unequal_replicas_do_not_train_with_is_refused(option, said):
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]], [[1]]])
    with pytest.raises(HexiError, match=said):
        _typed(plan, *option.split(), "--global-batch-size", "2")


def test_hosts_in_the_file_are_asked_for_by_name(tmp_path):
    """Those with as many GPUs are one component; nodes without hosts are asked for by partition."""
    hosts = CLUSTER.replace("count: 2", "hosts: 'gpu[07-08]'").replace("gpus: 1}", "gpus: 1, hosts: old1}")
    (tmp_path / "cluster.yaml").write_text(
        hosts.replace(
            "network:",
            "- {name: big, gpu: H100-SXM-80GB, gpus: 3, hosts: gpu11}\n"
            "- {name: part, gpu: T4-16GB, gpus: 2}\nnetwork:",
        )
    )
    cluster = read_cluster(tmp_path / "cluster.yaml")
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1] * 12]])
    lines = launch_lines(plan, cluster, [], plan_path="p", cluster_path="c", model="m")
    assert [node for node, _ in lines.torchrun] == ["gpu07", "gpu08", "old1", "gpu11", "part"]
    assert "--master-addr=gpu07" in lines.torchrun[0][1]
    assert lines.unnamed == ("part",)
    assert "Nodes have the cluster file's names here" in launch_text(lines)
    assert "file's names" not in launch_text(dataclasses.replace(lines, unnamed=()))
    asked = lines.sbatch[1].partition("sbatch ")[2].removesuffix(" scripts/slurm/train.sbatch").split(" : ")
    assert asked == [
        "--nodelist=gpu07,gpu08,gpu11 --nodes=3 --exclusive --ntasks-per-node=3 --gpus-per-node=3",
        "--nodelist=old1 --nodes=1 --exclusive --ntasks-per-node=1 --gpus-per-node=1",
        "--partition=part --nodes=1 --exclusive --ntasks-per-node=2 --gpus-per-node=2",
    ]


def test_slurm_s_lines_keep_the_user_s_own_flags(tmp_path):
    """A file that was written is given; else the line that writes it repeats the flags."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = read_cluster(tmp_path / "cluster.yaml")
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1] * len(cluster.ranks)]])
    own = ["--data-path", "my data"]

    def sbatch(**how):
        return launch_lines(plan, cluster, [], plan_path="p", cluster_path="c", model="m", **how).sbatch

    write, start = sbatch(more=own)
    assert write == "hexi launch p --cluster c --model m -o job.args -- --data-path 'my data'"
    assert "ARGUMENTS=job.args " in start
    (start,) = sbatch(more=own, written="mine.args")
    assert "ARGUMENTS=mine.args " in start


def test_what_the_plan_sets_is_not_typed_and_own_flags_stand():
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]])
    plan = dataclasses.replace(plan, job=JobTerms(precision="bf16"))
    model = ["--hidden-size", "64", "--num-attention-heads", "4", "--micro-batch-size", "1"]
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
    own = ["--lr", "2", "--data-path", "text"]
    flags = megatron_flags([*given, *model], own, plan, "plan.yaml")
    assert flags[:4] == ("--hexi-plan", "plan.yaml", "--num-layers", "2")
    assert flags[flags.index("--seq-length") + 1] == "64"
    assert flags[-4:] == ("--lr", "2", "--data-path", "text")
    assert not {"--bf16", "--tensor-model-parallel-size", "--mock-data"} & set(flags)


def test_an_error_is_a_document_with_json(monkeypatch, capsys):
    code, out, err = call_hexi(monkeypatch, capsys, ["show", "absent.yaml", "--json"])
    assert code == 2
    assert '"exit_code": 2' in out
    assert err.startswith("hexi: error: absent.yaml")


def test_the_kernel_that_the_image_lacks_is_named_with_what_to_type(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = read_cluster(tmp_path / "cluster.yaml")
    (gpu,) = assumed_kernels(None, cluster, 128)
    assert gpu.startswith("H100")
    plan, by_cudnn = (
        dataclasses.replace(
            proportional_plan(Workload(64, 4, 4, 128), [[[1, 1]]]), job=JobTerms(kernel={gpu: kernel})
        )
        for kernel in ("flash-attn-3", "cudnn")
    )
    (line,) = assumption_lines(cluster, plan)
    assert line.endswith(f"without it, plan with --kernel {gpu}=cudnn")
    assert assumption_lines(cluster, by_cudnn) == []


def test_a_kernel_that_the_shipped_image_lacks_is_not_asked_for():
    """Training takes the plan's where it is installed, and warns where it is not."""
    plan = proportional_plan(Workload(64, 4, 4, 16), [[[1, 1]]])
    kernels = {"H100-SXM-80GB": "flash-attn-3", "A100-SXM-80GB": "flash-attn-2"}
    flags = megatron_flags(_MODEL, [], dataclasses.replace(plan, job=JobTerms(kernel=kernels)), "plan.yaml")
    assert flags[2:4] == ("--hexi-kernel", "A100-SXM-80GB=flash-attn-2")
    only = dataclasses.replace(plan, job=JobTerms(kernel={"H100-SXM-80GB": "flash-attn-3"}))
    assert "--hexi-kernel" not in megatron_flags(_MODEL, [], only, "plan.yaml")
