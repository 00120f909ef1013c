"""config.json files of models whose layers differ: kinds of layers and routers against transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_config import MLATransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
    DeepseekV3TopkRouter,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_hexi.convert.config import read_model as read_to_convert
from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models import constant_flags, constant_notes, read_model
from megatron_hexi.options.parser import known_flags
from tests.support.published_configs import PUBLISHED

MISTRAL, QWEN2, QWEN3 = (PUBLISHED[name] for name in ("Mistral-7B-v0.1", "Qwen2.5-3B", "Qwen3-0.6B"))
MIXTRAL, QWEN3_MOE = PUBLISHED["mistralai/Mixtral-8x7B-v0.1"], PUBLISHED["Qwen/Qwen3-30B-A3B"]
DEEPSEEK, GLM = PUBLISHED["deepseek-ai/DeepSeek-V3"], PUBLISHED["zai-org/GLM-4.5"]
GPT_OSS, GEMMA = PUBLISHED["openai/gpt-oss-20b"], PUBLISHED["google/gemma-3-1b-pt"]
LLAMA4 = PUBLISHED["meta-llama/Llama-4-Scout-17B-16E"]["text_config"]
SLIDING = {"use_sliding_window": True, "sliding_window": 64}
LAYERS = 9
PATTERN = ["full_attention"] * 4 + ["sliding_attention"] * 5


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL,
        QWEN2 | SLIDING | {"max_window_layers": 4},
        QWEN3 | SLIDING | {"layer_types": PATTERN},
        QWEN3 | SLIDING | {"sliding_window": None},
        MIXTRAL | {"sliding_window": 4096},
        QWEN3_MOE | SLIDING,
        QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]},
        QWEN3_MOE | {"mlp_only_layers": list(range(LAYERS))},
        DEEPSEEK,
        DEEPSEEK | {"first_k_dense_replace": 0},
        GLM,
        GPT_OSS | {"layer_types": None},
        GPT_OSS | {"layer_types": PATTERN},
        GEMMA,
        GEMMA | {"sliding_window_pattern": 2},
        GEMMA | {"layer_types": PATTERN},
        LLAMA4 | {"interleave_moe_layer_step": 2},
        LLAMA4 | {"moe_layers": [0, 5], "no_rope_layer_interval": 3},
        LLAMA4 | {"no_rope_layers": [1, 0, 0] * 3},
        LLAMA4 | {"attention_chunk_size": None},
    ],
)
def test_kinds_of_layers_are_those_of_transformers(write, config):
    config = config | {"num_hidden_layers": LAYERS}
    found = read_model(write(config))
    own = AutoConfig.for_model(
        **{k: v for k, v in config.items() if k not in ("auto_map", "quantization_config")}
    )
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(own).model.layers
    routed = [any("experts." in name for name, _ in layer.named_parameters()) for layer in layers]
    types = getattr(own, "layer_types", None)
    window = (
        own.attention_chunk_size if own.model_type == "llama4_text" else getattr(own, "sliding_window", None)
    )
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * LAYERS
    narrow = [kind != "full_attention" for kind in types]
    assert _each(found.experts) == routed
    assert _each(found.window) == narrow
    if found.window:
        assert found.window.size == window
        assert found.window.in_chunks == (own.model_type == "llama4_text")


def _each(of_layers):
    if of_layers is None:
        return [False] * LAYERS
    return list(of_layers.layers) or [True] * LAYERS


@pytest.mark.parametrize(
    ("router", "config"),
    [
        (Qwen3MoeTopKRouter, QWEN3_MOE),
        (Qwen3MoeTopKRouter, QWEN3_MOE | {"norm_topk_prob": False}),
        (GptOssTopKRouter, GPT_OSS),
        (DeepseekV3TopkRouter, DEEPSEEK),
        (DeepseekV3TopkRouter, DEEPSEEK | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
        (
            DeepseekV3TopkRouter,
            DEEPSEEK | {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        ),
    ],
)
def test_routers_choose_as_those_of_transformers(write, router, config):
    config = config | {"hidden_size": 16}
    flags = constant_flags(write(config))
    value = {flag: flags[i + 1] for i, flag in enumerate(flags[:-1])}
    own = AutoConfig.for_model(
        **{k: v for k, v in config.items() if k not in ("auto_map", "quantization_config")}
    )
    theirs = router(own)
    generator = torch.Generator().manual_seed(3)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    bias = getattr(theirs, "e_score_correction_bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias, std=0.1, generator=generator)
    logits, weights, chosen = theirs(torch.randn(50, 16, generator=generator))
    groups, best = value.get("--moe-router-num-groups"), value.get("--moe-router-group-topk")
    found, _ = topk_routing_with_score_function(
        logits,
        config["num_experts_per_tok"],
        use_pre_softmax="--moe-router-pre-softmax" in flags,
        num_groups=groups and int(groups),
        group_topk=best and int(best),
        scaling_factor=float(value.get("--moe-router-topk-scaling-factor", 0)) or None,
        score_function=value["--moe-router-score-function"],
        expert_bias=bias,
    )
    torch.testing.assert_close(found, torch.zeros_like(found).scatter(1, chosen, weights))


@pytest.mark.parametrize("name", ["zai-org/GLM-4.5-Air", "microsoft/Phi-4"])
def test_the_rotated_part_of_a_head_is_that_of_transformers(write, name):
    config = {key: value for key, value in PUBLISHED[name].items() if key != "auto_map"}
    config |= {"partial_rotary_factor": 0.75} if config["model_type"] == "phi3" else {}
    flags = constant_flags(write(config))
    value = {flag: flags[i + 1] for i, flag in enumerate(flags[:-1])}
    found = RotaryEmbedding(
        read_model(write(config)).head_dim,
        rotary_percent=float(value["--rotary-percent"]),
        rotary_base=int(value["--rotary-base"]),
        use_cpu_initialization=True,
    )
    kind = {"phi3": Phi3RotaryEmbedding, "glm4_moe": Glm4MoeRotaryEmbedding}[config["model_type"]]
    torch.testing.assert_close(found.inv_freq, kind(AutoConfig.for_model(**config)).inv_freq)


@pytest.mark.parametrize(
    "scaling",
    [{}, {"mscale": 0.7}, {"mscale": None, "mscale_all_dim": None}, {"factor": 8.0}, None],
)
def test_latent_attention_rotates_and_scales_as_transformers_does(write, scaling):
    rope = None if scaling is None else DEEPSEEK["rope_scaling"] | scaling
    config = DEEPSEEK | {"num_hidden_layers": 1, "rope_scaling": rope}
    flags = constant_flags(write(config))
    value = {flag: flags[i + 1] for i, flag in enumerate(flags[:-1])}
    own: Any = AutoConfig.for_model(**{key: v for key, v in config.items() if key != "quantization_config"})
    with torch.device("meta"):
        attention = DeepseekV3Attention(own, 0)
    theirs = DeepseekV3RotaryEmbedding(own)
    factor, all_dim = (float(value.get(flag, 1)) for flag in ("--rotary-scaling-factor", "--mscale-all-dim"))
    scores = yarn._yarn_get_mscale(factor, all_dim) ** 2 / 192**0.5
    assert attention.scaling == pytest.approx(scores)
    base = int(value["--rotary-base"])
    if rope is None:
        assert value["--rope-type"] == "rope"
        found = RotaryEmbedding(64, rotary_percent=1.0, rotary_base=base, use_cpu_initialization=True)
        torch.testing.assert_close(found.inv_freq, theirs.inv_freq)
        return
    assert value["--rope-type"] == "yarn"
    built_in = MLATransformerConfig
    low, high = yarn._yarn_find_correction_range(
        built_in.beta_fast, built_in.beta_slow, 64, base, built_in.original_max_position_embeddings
    )
    kept = 1 - yarn._yarn_linear_ramp_mask(low, high, 32, torch.device("cpu"))
    plain = 1.0 / base ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    torch.testing.assert_close(plain / factor * (1 - kept) + plain * kept, theirs.inv_freq, rtol=2e-6, atol=0)
    multiplier = yarn._yarn_get_concentration_factor(factor, float(value["--mscale"]), all_dim)
    assert multiplier == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "/" in name])
def test_flags_are_megatrons(write, name):
    try:
        flags = constant_flags(write(PUBLISHED[name]))
    except NoFlagError:
        assert re.search("Kimi|Llama-4|gemma|128k|Phi-4-mini", name)
        return
    assert {flag for flag in flags if flag.startswith("--")} <= known_flags()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok = 1: Megatron has no softmax over one"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob = false: Megatron normalises sigmoids"),
        (DEEPSEEK | {"topk_group": 2}, "topk_group = 2: Megatron compares groups by"),
        (DEEPSEEK | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": None}}, "mscale_all_dim = 1.0"),
        (
            DEEPSEEK | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_slow": 2}},
            "beta_slow = 2: Megatron's",
        ),
        (
            DEEPSEEK
            | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"original_max_position_embeddings": 8192}},
            "original_max_position_embeddings = 8192: Megatron's latent",
        ),
        (GPT_OSS | {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5: Megatron's --quick-geglu always has 1.702"),
        (GEMMA, 'model_type = "gemma3_text": Megatron has no flags for norms behind'),
        (LLAMA4, 'model_type = "llama4_text": Megatron has no flags for attention in chunks'),
    ],
)
def test_a_constant_that_megatron_lacks_is_named_and_the_shapes_are_read(write, config, said):
    folder = write(config)
    assert read_model(folder).layers == config["num_hidden_layers"]
    with pytest.raises(NoFlagError, match=re.escape(said)):
        constant_flags(folder)


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "deepseek_v2", "kimi_linear", "mamba2", "gemma2", "olmoe"]
)
def test_another_type_is_refused_by_name(write, model_type):
    with pytest.raises(
        HexiError, match=f'model_type = "{model_type}" is not known; write one whose shapes are the same'
    ):
        read_model(write(QWEN3_MOE | {"model_type": model_type}))


def test_a_model_with_vision_says_that_vision_is_left_out(write):
    folder = write(PUBLISHED["google/gemma-3-4b-pt"])
    assert read_model(folder).source == f"{folder / 'config.json'}: text_config; vision is left out"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MISTRAL, "sliding_window = 4096: attention in a window is not converted; set it to null"),
        (LLAMA4, 'model_type = "llama4_text": another architecture is not converted; give one of llama'),
    ],
)
def test_what_is_read_but_not_converted_is_refused_by_name(write, config, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        read_to_convert(write(config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            PUBLISHED["openai/gpt-oss-20b"],
            ("only where output_router_logits is true", "--moe-aux-loss-coeff 0.9"),
        ),
        (PUBLISHED["openai/gpt-oss-20b"] | {"output_router_logits": True}, ()),
        (PUBLISHED["openai/gpt-oss-20b"] | {"router_aux_loss_coef": 0}, ()),
        (PUBLISHED["deepseek-ai/DeepSeek-V3"], ("computes no load-balancing loss for this type",)),
        (PUBLISHED["Llama-2-7b"], ()),
    ],
)
def test_a_loss_that_transformers_does_not_train_with_is_noted(write, config, said):
    notes = constant_notes(write(config))
    assert len(notes) == bool(said)
    assert all(text in notes[0] for text in said)


def test_so_is_that_of_a_preset():
    [note] = constant_notes("gpt-oss-20b")
    assert note.startswith("gpt-oss-20b: transformers adds the load-balancing loss on request")
    assert "(--moe-aux-loss-coeff 0.9): append --moe-router-load-balancing-type none" in note
    assert constant_notes("llama3-8b") == ()
