"""Scripts in the style of slime, ms-swift, verl and Megatron's own, read as a model and a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.models import argument_words, presets, read_model, read_terms, reading_notes

_SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --position-embedding-type rope"
)
_SLIME = f"""\
source missing.sh
MODEL_ARGS=({_SHAPE} --swiglu --rotary-base "${{BASE:-10000}}" --use-gated-attention)
LOOP=(--rollout-batch-size 8 --advantage-estimator grpo --save $RUNS/a)
ray job submit -- python3 train.py ${{MODEL_ARGS[@]}} "${{LOOP[@]}}" --tensor-model-parallel-size 2
"""
_SWIFT = """\
NPROC_PER_NODE=8 \\
megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --sequence_parallel true \\
  --cross_entropy_loss_fusion false --max_length 8192 --micro_batch_size 1 --global_batch_size 16 \\
  --recompute_granularity none --packing true --tuner_type full
"""
_VERL = """\
TP=${TP:-2}
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' data.max_prompt_length=1024 \\
  data.max_response_length=$((1024 * 3)) actor_rollout_ref.model.path=/models/Qwen3-30B-A3B \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP actor_rollout_ref.rollout.n=4 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False \\
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8 trainer.nnodes=1 trainer.save_freq=2 $@
"""
_YAML = """\
ENV_VARS:
  A: 1
MODEL_ARGS:
  # sizes
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 4096 # tokens
  --position-embedding-type: rope
  --bf16: true
  --swiglu: false
  --data-path: ${DATA}/text
  --num-layers: 6
METRICS: [a]
"""


def _written(text: str, name: str = "train.sh") -> str:
    Path(name).write_text(text)
    return name


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_slime():
    path = _written(_SLIME)
    model, terms = read_model(path), read_terms(path)
    assert (model.layers, model.gated, model.output_gate) == (4, True, True)
    assert terms is not None
    assert terms.fields["tensor_parallel"] == 2
    assert reading_notes(path) == (
        "the arguments are those of train.py (line 4)",
        "not Megatron's: --rollout-batch-size, --advantage-estimator",
        "the environment is not read, these defaults are: ${BASE:-10000} (line 2)",
        (
            "left out, as only a running shell knows them: --save $RUNS/a (line 3); give them behind "
            "-- of hexi launch"
        ),
    )


def test_ms_swift():
    path = _written(_SWIFT)
    model, terms = read_model(path), read_terms(path)
    assert (model.layers, model.hidden_size, model.qk_norm) == (36, 4096, True)
    assert terms is not None
    expected: dict[str, object] = {
        "seq_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 16,
        "tensor_parallel": 2,
    }
    expected |= {"precision": "bf16", "distributed_optimizer": True, "sequence_parallel": True}
    assert terms.fields.items() >= expected.items()
    assert "--cross-entropy-loss-fusion" not in (argument_words(path) or ())
    assert reading_notes(path)[1] == "not Megatron's: --packing"


def test_verl():
    path = _written(_VERL)
    model, terms = read_model(path), read_terms(path)
    preset = presets()["qwen3-30b-a3b"]
    assert (model.layers, model.experts) == (preset.layers, preset.experts)
    assert terms is not None
    expected = {"seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 32, "tensor_parallel": 2}
    assert terms.fields.items() >= (expected | {"recompute": "full"}).items()
    assert "rotary" in terms.fields["unfused"]
    assert reading_notes(path)[1] == (
        "not Megatron's: --config-name, actor_rollout_ref.ref.megatron.tensor_model_parallel_size, "
        "trainer.* (2)"
    )


def test_the_yaml_of_functional_tests():
    path = _written(_YAML, "model_config.yaml")
    model, terms = read_model(path), read_terms(path)
    assert (model.layers, model.gated, model.vocab_size) == (6, False, 50257)
    assert terms is not None
    assert terms.fields["seq_length"] == 4096
    assert reading_notes(path) == (
        (
            "left out, as only a running shell knows them: --data-path ${DATA}/text (line 12); give them "
            "behind -- of hexi launch"
        ),
        "the size of the vocabulary is the tokenizer's; planned with 50257, add --vocab-size for another",
    )


def test_a_config_beside_the_script_is_the_model():
    path = _written(_SWIFT.replace("Qwen/Qwen3-8B", "Own/Model"))
    with pytest.raises(
        HexiError, match=r"line 2: --model Own/Model: is not known .* put it into Model/ beside"
    ):
        read_model(path)
    Path("Model").mkdir()
    Path("Model/config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 512, "rope_theta": 10000.0, '
        '"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu", '
        '"tie_word_embeddings": false}'
    )
    assert read_model(path).layers == 3


def test_a_missing_file_is_named_where_the_model_may_be_in_it():
    with pytest.raises(
        HexiError, match=r"train\.sh, line 1: missing\.sh: is read here, and is not there; put"
    ):
        read_model(_written(_SLIME.replace("--num-layers 4", "")))


def test_arguments_that_only_bash_fills_in_are_planned_through_it():
    path = _written(f"N=$(nproc)\nMODEL=({_SHAPE} --ffn-hidden-size $N)\n", "model.sh")
    with pytest.raises(HexiError, match=r"line 1: \$\(nproc\): only a running shell knows it") as problem:
        read_model(path)
    remedy = str(problem.value).rpartition("let bash fill it in: ")[2]
    assert remedy == (
        "hexi plan CLUSTER.yaml -o plan.yaml -- bash -c 'source model.sh; torchrun train.py "
        '"${MODEL[@]}" --micro-batch-size 1 --seq-length 4096\''
    )


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (_SWIFT.replace("--tuner_type full", "--tuner_type lora --lora_rank 16"), 16),
        (_SWIFT.replace("--tuner_type full", "--tuner_type lora"), 8),
        (_SWIFT.replace("--tuner_type full", "--tuner_type full --lora_rank 16"), None),
        (_VERL.replace("trainer.nnodes=1", "actor_rollout_ref.model.lora_rank=32"), 32),
        (_VERL.replace("trainer.nnodes=1", "actor_rollout_ref.model.lora_rank=0"), None),
    ],
)
def test_the_rank_of_adapters(text, rank):
    path = _written(text)
    terms = read_terms(path)
    assert terms is not None
    assert terms.fields.get("lora_rank") == rank
    if rank is not None:
        with pytest.raises(HexiError, match=r"adapters on frozen weights: .*; start your script of"):
            argument_words(path)


def test_all_mistakes_are_told_at_once():
    text = _SWIFT.replace("--tuner_type full", "--tuner_type adalora --fp4_format e2m1 --save_steps 2")
    with pytest.raises(HexiError) as problem:
        read_model(_written(text.replace("Qwen/Qwen3-8B", "Own/Model")))
    told = re.findall(r"\(\d\) train\.sh, line \d: (\S+)", str(problem.value))
    assert told == ["--model", "--tuner-type", "--fp4-format"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            _SLIME.replace("--use-gated-attention", "--post-mlp-layernorm"),
            "line 2: --post-mlp-layernorm: has norms",
        ),
        (_SLIME.replace(" --swiglu", " --num-layers $N"), "line 2: $N: only a running shell knows it"),
        (
            _VERL.replace("trainer.nnodes=1", "actor_rollout_ref.model.lora_rank=all"),
            "actor_rollout_ref.model.lora_rank all: is no rank; give a whole number above 0",
        ),
        (
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            "line 1: verl trains without Megatron here",
        ),
        (
            f"torchrun pretrain_gpt.py {_SHAPE} --micro-batch-size 1 --rollout-top-p 1",
            "line 1: --rollout-top-p: Megatron 0.17",
        ),
    ],
)
def test_what_changes_numbers_is_refused_by_name(text, said):
    with pytest.raises(HexiError) as problem:
        read_model(_written(text))
    assert said in str(problem.value)
