"""Mixtures of experts between transformers and Megatron: bits there and back, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hexi.convert.config import read_model
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Workload, proportional_plan, write_plan
from tests.megatron.conversion import SEQ_LENGTH, VOCABULARY, Conversion

transformers = pytest.importorskip("transformers", reason="pip install transformers")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="pip install safetensors")

HEADS, LAYERS, HIDDEN = 4, 3, 64
COMMON = {
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 24}
SCORED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
GROUPED = {"n_shared_experts": 2, "n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_moe-dense-layer": QWEN | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SCORED | LATENT | GROUPED | {"model_type": "deepseek_v3"},
    "deepseek_v3-whole-queries": SCORED
    | LATENT
    | {"model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "glm4_moe": SCORED
    | {"model_type": "glm4_moe", "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": YARN,
    },
}


def random_model(family: str) -> Any:
    """Return transformers' model with random weights, norms and biases too."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**COMMON | CONFIGS[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("inv_freq"):
                weight.normal_(0, 0.1).add_("norm" in name)
    return model


def one_rank(folder: Path) -> list[str]:
    """A plan of one rank: Megatron's own attention on a CPU takes no latent one."""
    workload = Workload(
        SEQ_LENGTH,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=LATENT["qk_rope_head_dim"] + LATENT["qk_nope_head_dim"],
        value_dim=LATENT["v_head_dim"],
        layers=LAYERS,
        hidden_size=HIDDEN,
    )
    write_plan(proportional_plan(workload, [[(1.0,)]]), folder / "plan.yaml")
    return ["--hexi-plan", "plan.yaml"]


#: Scores by sigmoid, with latent attention and shared experts; scores by softmax, with biases and sinks.
IN_CI = ("deepseek_v3", "gpt_oss")
#: Without Transformer Engine, Megatron refuses latent attention whose queries have no latent columns.
NOT_ON_A_CPU = "deepseek_v3-whole-queries"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in IN_CI else pytest.mark.slow)
        for family in CONFIGS
        if family != NOT_ON_A_CPU
    ],
)
def test_weights_come_back_as_they_were_and_megatron_computes_the_same(forks, tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    conversion = Conversion(forks, tmp_path)
    conversion.convert("hf-to-megatron", "model", "weights")
    conversion.convert("megatron-to-hf", "weights", "back", "--like", "model")
    before, after = (
        safetensors_torch.load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "back")
    )
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []

    plan = one_rank(tmp_path) if "deepseek" in family else []
    tokens, logits = conversion.megatron_logits("weights", *plan)
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_moe", NOT_ON_A_CPU))]
)
def test_experts_of_a_layer_in_one_tensor_are_read_too(forks, tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    published = safetensors_torch.load_file(tmp_path / "model/model.safetensors")
    joined = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in joined)
    safetensors_torch.save_file(joined, tmp_path / "model/model.safetensors")
    conversion = Conversion(forks, tmp_path)
    conversion.convert("hf-to-megatron", "model", "weights")
    conversion.convert("megatron-to-hf", "weights", "back", "--like", "model")
    after = safetensors_torch.load_file(tmp_path / "back/model.safetensors")
    assert published.keys() == after.keys()
    assert [name for name in after if not torch.equal(published[name], after[name])] == []


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("mixtral", {"sliding_window": 16}, "sliding_window = 16"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path, family, change, said):
    config = {**COMMON, **CONFIGS[family], **change}
    config.pop("rope_scaling", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HexiError, match=said):
        read_model(tmp_path)
