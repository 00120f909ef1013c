"""Models: presets against published totals, files of both kinds, each broken one refused in one line."""

import json
import re
from dataclasses import replace

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.models import (
    Job,
    Model,
    argument_words,
    constant_flags,
    job_of_plan,
    presets,
    read_model,
    read_terms,
)
from megatron_hexi.plan import Workload, proportional_plan
from tests.support.costs import TINY

LLAMA3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}

LLAMA3_8B_ARGUMENTS = """\
# Llama 3 8B, as one would launch it
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
--num-attention-heads 32   # heads
--group-query-attention --num-query-groups 8
--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
--vocab-size 128256 --position-embedding-type rope --lr 3e-4 --bf16 --use-mcore-models
"""


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [
        ("gpt-3b", 2.7, 0.02),
        ("gpt-7b", 6.7, 0.01),
        ("gpt-13b", 13.0, 0.02),
        # No published total: 80 x 12 x 8192^2 and the vocabulary.
        ("gpt-70b", 64.84, 0.001),
        ("llama3-8b", 8.03, 0.001),
        ("llama3-70b", 70.6, 0.001),
        ("qwen3-8b", 8.2, 0.002),
        ("qwen3-32b", 32.8, 0.002),
    ],
)
def test_presets_have_the_published_number_of_weights(name, billions, within):
    assert presets()[name].total_params == pytest.approx(billions * 1e9, rel=within)
    assert presets()[name].source


def test_counts_by_hand():
    assert TINY.matrix_params() == 512 * 128 * (4 + 4 + 4) + 4 * 128 * 512 + 2 * 512 * 2048 == 3145728
    assert TINY.layer_params() == 3145728 + 2 * 512
    assert TINY.total_params == 2 * (3145728 + 1024) + 1024 * 512 + 512
    # Two tensor-parallel ranks: half the matrices, all of the norms.
    assert TINY.layer_params(2) == 3145728 // 2 + 1024
    gated = Model("g", 1, 64, 4, 2, 16, 128, gated=True, vocab_size=100, tied_embeddings=False, biases=True)
    assert gated.matrix_params() == 64 * 16 * (4 + 2 * 2) + 64 * 64 + 3 * 64 * 128
    # Norms have weights and biases; biases of QKV, gate and MLP in, projection, MLP out.
    assert gated.vector_params() == 4 * 64 + 16 * (4 + 2 * 2) + 2 * 128 + 2 * 64
    assert gated.vector_params(2) == 4 * 64 + 16 * (2 + 2 * 1) + 128 + 2 * 64
    assert replace(gated, norm_biases=False).vector_params() == gated.vector_params() - 2 * 64
    only_qkv = replace(gated, biases=False, qkv_bias=True)
    assert only_qkv.vector_params() == 2 * 64 + 16 * (4 + 2 * 2)


def test_vocabularies_are_padded_as_megatron_does():
    assert presets()["gpt-7b"].padded_vocab() == 50304
    assert presets()["gpt-7b"].padded_vocab(8) == 51200


def same_shape(a, b):
    fields = vars(a).keys() - {"name", "source", "norm_biases"}  # None and false are the same here
    return {field: getattr(a, field) for field in fields} == {field: getattr(b, field) for field in fields}


def test_a_config_json_and_its_folder_give_the_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    for path in (tmp_path / "config.json", tmp_path):
        assert same_shape(read_model(path), presets()["llama3-8b"])


def test_megatron_s_arguments_give_the_preset(tmp_path):
    (tmp_path / "llama.args").write_text(LLAMA3_8B_ARGUMENTS)
    assert same_shape(read_model(tmp_path / "llama.args"), presets()["llama3-8b"])


def test_megatron_s_defaults(tmp_path):
    text = "--num-layers=2 --hidden-size=1024 --num-attention-heads=8 --vocab-size=1000 "
    text += "--max-position-embeddings=64"
    (tmp_path / "a").write_text(text)
    model = read_model(tmp_path / "a")
    assert (model.ffn_hidden_size, model.kv_heads, model.head_dim) == (4096, 8, 128)
    assert (model.gated, model.biases, model.tied_embeddings, model.learned_positions) == (
        False,
        True,
        True,
        64,
    )
    (tmp_path / "a").write_text(text + " --swiglu")
    assert read_model(tmp_path / "a").ffn_hidden_size == 2688


def test_a_gpt2_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257})
    )
    model = read_model(tmp_path)
    assert model.total_params == pytest.approx(124.4e6, rel=0.001)
    assert model.ffn_hidden_size == 3072


def without(field):
    return {key: value for key, value in LLAMA3_8B.items() if key != field}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not valid JSON"),
        ("{" * 100000, "not valid JSON"),
        ('{"model_type": "bert"}', 'model_type = "bert" is not known; write one'),
        ("{}", "model_type is missing"),
        ("[]", "not a mapping of fields"),
        (json.dumps(without("hidden_size")), "hidden_size is missing; add it"),
        (json.dumps(without("intermediate_size")), "intermediate_size is missing; add it"),
        (json.dumps(LLAMA3_8B | {"vocab_size": "many"}), 'vocab_size = "many"; write a whole number'),
        (json.dumps(LLAMA3_8B | {"num_attention_heads": 0}), "num_attention_heads = 0; write"),
        (json.dumps(LLAMA3_8B | {"num_attention_heads": 30}), "30 heads do not divide hidden size 4096; add"),
        (json.dumps(LLAMA3_8B | {"num_key_value_heads": 5}), "kv_heads = 5 does not divide the 32 heads"),
        (json.dumps(LLAMA3_8B | {"num_local_experts": 8}), "num_local_experts = 8: mixture of experts"),
        (
            json.dumps(LLAMA3_8B | {"sliding_window": 4096}),
            "sliding_window = 4096: attention in a window is not supported; give a mistral",
        ),
        (json.dumps(LLAMA3_8B | {"tie_word_embeddings": 1}), "tie_word_embeddings = 1; write true or false"),
    ],
)
def test_a_broken_config_json_is_one_clear_error(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(HexiError, match=re.escape(said)) as problem:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_window_that_is_not_used_is_harmless(tmp_path):
    config = LLAMA3_8B | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).layers == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            LLAMA3_8B_ARGUMENTS + "--num-experts 8 --moe-latent-size 32",
            "line 7: --moe-latent-size does not work with hexi plan: the weights around latent experts are",
        ),
        (
            LLAMA3_8B_ARGUMENTS + "--num-experts 8 --moe-layer-freq [0]*32",
            "--moe-layer-freq leaves no layer with experts; leave --num-experts out",
        ),
        (
            LLAMA3_8B_ARGUMENTS + "--num-experts 8 --moe-layer-freq [0,1]*99999999",
            "--moe-layer-freq [0,1]*99999999: not a list of 0 and 1; write it",
        ),
        (
            LLAMA3_8B_ARGUMENTS + "--window-size 9,0 --window-attn-skip-freq [0,1]",
            "--window-attn-skip-freq has 2 entries for the model's 32 layers; give one for each",
        ),
        (
            LLAMA3_8B_ARGUMENTS.replace("--group-query-attention", "")
            + "--multi-latent-attention --no-rope-fusion",
            "--multi-latent-attention without --qk-layernorm is not supported: its weights are unknown; add",
        ),
        (
            LLAMA3_8B_ARGUMENTS + "--swigluu",
            "line 7: --swigluu: Megatron 0.17 to 0.19 has no such argument; did",
        ),
        (LLAMA3_8B_ARGUMENTS + "32", "line 7: 32: belongs to no argument; remove it"),
        (
            LLAMA3_8B_ARGUMENTS + "--squared-relu",
            "line 7: --squared-relu does not work with --swiglu: Megatron refuses it; leave one",
        ),
        (
            LLAMA3_8B_ARGUMENTS + "--encoder-num-layers 2",
            "line 7: --encoder-num-layers does not work with --num-layers: Megatron refuses it",
        ),
        (
            "--num-layers: 32\n--hidden-size: 64",
            "line 1: --num-layers: this file is YAML; write its entries as",
        ),
        ("ARGS=( --num-layers 32 )\n--lr 1", "line 2: --lr: stands outside the script's arguments"),
        ("ARGS=( --num-layers 32", "line 1: ARGS=(: is not closed; close the parenthesis"),
        (
            "ARGS=( --num-layers 32 )\ntorchrun x.py",
            "no arguments in it; write Megatron's",
        ),
        (LLAMA3_8B_ARGUMENTS + "--hidden-size", "expected one argument; correct that flag"),
        (LLAMA3_8B_ARGUMENTS.replace("--num-layers 32", ""), "--num-layers is missing; add it"),
        (LLAMA3_8B_ARGUMENTS.replace("32   #", "x   #"), "invalid int value: 'x'; correct that flag"),
        (
            LLAMA3_8B_ARGUMENTS.replace("--num-query-groups 8", ""),
            "--num-query-groups (beside --group-query-attention) is missing; add it",
        ),
        ("--num-layers 2 --hidden-size 10 --num-attention-heads 3 --vocab-size 9", "add --kv-channels"),
        (
            "--num-layers 2 --hidden-size 9 --num-attention-heads 3 --vocab-size 9",
            "--max-position-embeddings, or --position-embedding-type rope, is missing",
        ),
        ("--num-layers '2", "line 1: '2: is not closed; close the quotes"),
        ("a plan: no", "no arguments in it"),
        ("", "no arguments in it"),
    ],
)
def test_broken_arguments_are_one_clear_error(tmp_path, text, said):
    path = tmp_path / "model.args"
    path.write_text(text)
    with pytest.raises(HexiError, match=re.escape(said)) as problem:
        read_model(path)
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_all_mistakes_of_a_file_are_one_error(tmp_path):
    """Unknown, wrong, refused, contradicting and missing ones, each with its line."""
    path = tmp_path / "job.args"
    path.write_text(
        "--num-layers 2 --hidden-size 10 --num-attention-heads 3\n--swiglu --squared-relu\n"
        "--num-epochs 32 9\n--num-rollout 7\n--lr x --min-lr y\n--fp4-format e2m1\n"
        "--use-kitchen-attention\n--lr-decay-style cosine stray\n--nproc_per_node 8\n"
    )
    with pytest.raises(HexiError) as problem:
        read_model(path)
    mistakes = re.split(r" \(\d+\) ", str(problem.value).replace(f"{path}", "job.args"))
    assert [re.split("; |: (?:its|a) ", mistake)[0] for mistake in mistakes] == [
        "11 mistakes:",
        "job.args, line 5: argument --lr: invalid float value: 'x'",
        "job.args, line 5: argument --min-lr: invalid float value: 'y'",
        "job.args, lines 3, 4: --num-epochs, --num-rollout: Megatron 0.17 to 0.19 has no such argument",
        "job.args, line 8: stray: belongs to no argument",
        "job.args, line 9: --nproc_per_node: is the launcher's",
        "job.args, line 7: --use-kitchen-attention does not work with --hexi-plan",
        "job.args, line 6: --fp4-format does not work with --hexi-plan",
        "job.args, line 2: --squared-relu does not work with --swiglu: Megatron refuses it",
        "job.args: --num-attention-heads 3 does not divide --hidden-size 10",
        "job.args: --vocab-size is missing",
        "job.args: --max-position-embeddings, or --position-embedding-type rope, is missing",
    ]


@pytest.mark.parametrize(("name", "known"), [("Qwen3-8B", "qwen3-8b"), ("Llama3-8B-32K", "llama3-8b-32k")])
def test_names_in_any_capitals_are_presets_and_recipes(name, known):
    assert read_model(name) == read_model(known)
    assert read_terms(name) == read_terms(known)
    assert argument_words(name) == argument_words(known)
    assert constant_flags(name) == constant_flags(known)


def test_a_file_goes_before_a_preset_in_capitals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").write_text(LLAMA3_8B_ARGUMENTS)
    assert same_shape(read_model("Qwen3-8B"), presets()["llama3-8b"])


@pytest.mark.parametrize(
    ("name", "near"), [("Qwen/Qwen3-8B", "qwen3-8b"), ("meta-llama/Meta-Llama-3-70B", "llama3-70b")]
)
def test_names_on_hugging_face_are_refused_with_the_near_preset(name, near):
    with pytest.raises(HexiError, match=rf"is no preset, recipe or file; did you mean {near} "):
        read_model(name)


def test_unknown_models_are_refused_with_near_ones():
    with pytest.raises(HexiError, match="did you mean llama3-8b"):
        read_model("llama-8b")
    with pytest.raises(HexiError, match=r"presets: gpt-3b, gpt-7b"):
        read_model("zzz")


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HexiError, match="not text"):
        read_model(tmp_path / "binary")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_length": 0}, "--seq-length 0: write a whole number above 0"),
        (
            {"tensor_parallel": 3},
            "--tensor-model-parallel-size 3: give a number that divides the heads of tiny, 4",
        ),
        (
            {"pipeline_parallel": 3},
            "--pipeline-model-parallel-size 3: the model has 2 layers; give 2 or fewer",
        ),
        ({"micro_batch_size": 3}, "--global-batch-size 8: give a multiple of --micro-batch-size 3"),
        ({"recompute": "some"}, "--recompute-granularity some: use none, selective, full"),
        ({"precision": "int8"}, "--precision int8: use bf16, fp16, fp32"),
    ],
)
def test_impossible_jobs_are_refused(changes, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        Job(**{"model": TINY, "seq_length": 128} | changes)


def test_a_job_makes_the_workload_and_a_plan_its_job():
    job = Job(TINY, 128, tensor_parallel=2)
    assert job.workload() == Workload(128, 4, 4, 128, layers=2, hidden_size=512, tensor_parallel=2)
    plan = proportional_plan(job.workload(), [[[1, 1]], [[1, 1]]])
    assert job_of_plan(plan, TINY) == Job(TINY, 128, tensor_parallel=2, data_parallel=2)
