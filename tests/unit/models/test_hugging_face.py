"""config.json files: weights and rotary frequencies against transformers, and every field accounted for."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_hexi.errors import HexiError
from megatron_hexi.models import read_model
from megatron_hexi.models.hugging_face.fields import HARMLESS, HARMLESS_FIELDS, NEEDED, ONLY
from megatron_hexi.models.hugging_face.types import TYPES
from megatron_hexi.models.hugging_face.wrappers import WRAPPERS
from tests.support.published_configs import PUBLISHED


def count_by_transformers(config):
    """Weights of transformers' own language model, which has no memory on the meta device; shared ones once.

    Biases of routers are buffers there. Quantized weights and code of a model's own are left out.
    """
    values = without(config, "quantization_config", "auto_map")
    if values["model_type"] == "kimi_k2":  # transformers reads it as this
        values["model_type"] = "deepseek_v3"
    own = AutoConfig.for_model(**values)
    with torch.device("meta"):
        if values["model_type"].startswith(("qwen2_5_vl", "qwen3_vl")):  # no causal model of their texts
            model = AutoModelForImageTextToText.from_config(own)
            del model.model.visual
        else:
            model = AutoModelForCausalLM.from_config(own.get_text_config())
    names = ("e_score_correction_bias", "expert_bias")
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith(names)]
    return sum(weight.numel() for weight in [*model.parameters(), *biases])


def count(folder):
    """Weights of our model without the rows that Megatron adds to the vocabulary."""
    model = read_model(folder)
    added = (model.padded_vocab() - model.vocab_size) * model.hidden_size
    return model.total_params - added * (1 if model.tied_embeddings else 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_those_of_transformers(write, name):
    assert count(write(PUBLISHED[name])) == count_by_transformers(PUBLISHED[name])


#: Other names of fields that files have and transformers ignores.
EXTRA_ALIASES = {
    # transformers' Lfm2Config and Lfm2MoeConfig take them from what the file has beside its own fields.
    "lfm2": {"tie_embedding", "block_ff_dim"},
    "lfm2_moe": {"tie_embedding"},
    "gpt_oss": {"experts_per_token"},
    "gemma3_text": {"_sliding_window_pattern"},
    "nemotron_h": {"attention_head_dim", "rms_norm_eps"}
    | {"mamba_n_groups", "mamba_d_conv", "mamba_conv_bias", "mamba_dt_limit"},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_of_transformers_is_accounted_for_and_defaults_are_its(model_type):
    kind = TYPES[model_type]
    config: Any = type(AutoConfig.for_model("deepseek_v3" if model_type == "kimi_k2" else model_type))
    known = kind.used.keys() | kind.only.keys() | kind.harmless | kind.aliases.keys()
    assert set(config().to_dict()) - known - ONLY.keys() - HARMLESS_FIELDS == set()
    more = {"layer_types": ["conv"]} if kind.used.get("layer_types") is NEEDED else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config(num_hidden_layers=1, vocab_size=8, pad_token_id=0, **more)
        )
    assert type(model).__name__ == kind.architecture
    own = inspect.signature(config).parameters
    names = {field: alias for alias, field in kind.aliases.items() if alias in own} | {
        name: name for name in own
    }
    wanted = {
        field: default
        for field, default in kind.used.items()
        if default is not NEEDED and field in names and names[field] != "rope_parameters"
    }
    assert {field: own[names[field]].default for field in wanted} == wanted
    rope = config().to_dict().get("rope_parameters") or {}
    if "full_attention" in rope:
        assert kind.used["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in kind.used:
            assert kind.used[field] == rope[field]
    extra = EXTRA_ALIASES.get(model_type, set())
    assert {name: field for name, field in kind.aliases.items() if name not in extra} == config.attribute_map
    assert extra <= kind.aliases.keys()


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_every_field_of_a_model_with_vision_is_accounted_for(model_type):
    wrapper, config = WRAPPERS[model_type], AutoConfig.for_model(model_type)
    known = wrapper.harmless | ONLY.keys() | HARMLESS_FIELDS
    assert set(config.to_dict()) - known == {"text_config", "architectures", "tie_word_embeddings"}
    text = config.get_text_config()
    assert text.model_type == (wrapper.text_name or wrapper.text_type)
    if not wrapper.text_name:
        return
    kind, values = TYPES[wrapper.text_type], text.to_dict()  # the layers of another type
    values |= values.pop("rope_parameters")
    known |= kind.used.keys() | kind.only.keys() | kind.harmless
    assert set(values) - known <= {"rope_type"}
    # That of the whole model, and those of windows, which are off.
    apart = {"tie_word_embeddings", "sliding_window", "max_window_layers", "layer_types"}
    defaults = {
        field: default
        for field, default in {**kind.used, **wrapper.defaults}.items()
        if default is not NEEDED and field in values.keys() - apart
    }
    assert {field: default or None for field, default in defaults.items()} == {
        field: values[field] or None
        for field in defaults  # no layers, or none said
    }


def test_no_field_is_told_twice():
    for kind in TYPES.values():
        assert not (kind.used.keys() | kind.only.keys() | kind.harmless) & HARMLESS_FIELDS
        assert not kind.used.keys() & kind.only.keys()
        assert not (kind.used.keys() | kind.only.keys()) & kind.harmless
    assert not ONLY.keys() & HARMLESS_FIELDS
    assert len(HARMLESS_FIELDS) == sum(map(len, HARMLESS.values()))


#: The sizes that transformers has defaults for and we ask for.
LLAMA = {
    name: PUBLISHED["TinyLlama-1.1B"][name]
    for name in PUBLISHED["TinyLlama-1.1B"]
    if name not in ("rope_scaling", "rms_norm_eps")
}
QWEN2, QWEN3 = PUBLISHED["Qwen2.5-3B"], PUBLISHED["Qwen3-0.6B"]
MISTRAL, GPT2 = PUBLISHED["Mistral-7B-v0.3"], PUBLISHED["gpt2"]
MIXTRAL = PUBLISHED["mistralai/Mixtral-8x7B-v0.1"]
QWEN3_MOE, GPT_OSS = PUBLISHED["Qwen/Qwen3-30B-A3B"], PUBLISHED["openai/gpt-oss-20b"]
DEEPSEEK, GLM = PUBLISHED["deepseek-ai/DeepSeek-V3"], PUBLISHED["zai-org/GLM-4.5"]
GEMMA, VISION = PUBLISHED["google/gemma-3-1b-pt"], PUBLISHED["google/gemma-3-4b-pt"]
LLAMA4 = PUBLISHED["meta-llama/Llama-4-Scout-17B-16E"]["text_config"]
PHI3 = PUBLISHED["microsoft/Phi-3-mini-4k-instruct"]
SMALL = {"num_hidden_layers": 2}


def without(config, *fields):
    return {field: value for field, value in config.items() if field not in fields}


@pytest.mark.parametrize(
    "config",
    [
        without(QWEN3 | SMALL, "head_dim", "num_key_value_heads", "tie_word_embeddings")
        | {"num_attention_heads": 32},
        without(MISTRAL | SMALL, "num_key_value_heads", "head_dim"),
        QWEN2 | SMALL | {"head_dim": 64, "attention_bias": True},
        without(LLAMA | SMALL, "num_key_value_heads", "tie_word_embeddings", "architectures"),
        without(GPT2, "n_embd", "n_head", "n_layer")
        | {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2},
        GPT2 | {"n_inner": 100, "n_layer": 2, "tie_word_embeddings": False, "max_position_embeddings": 1024},
    ],
    ids=["qwen3", "mistral", "qwen2", "llama", "gpt2 with other names", "gpt2"],
)
def test_what_a_file_leaves_out_is_transformers_default(write, config):
    assert count(write(config)) == count_by_transformers(config)


WINDOWS = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            LLAMA | {"residual_multiplier": 0.22},
            "residual_multiplier = 0.22: transformers' llama has no such field",
        ),
        (LLAMA | {"log_scale": False}, "log_scale = false: transformers' llama has no such field"),
        (
            LLAMA | {"auto_map": {"AutoConfig": "a.B"}},
            "a model with code of its own is not supported; remove it if",
        ),
        (
            LLAMA | {"quantization_config": {"bits": 4}},
            "training quantized weights is not supported; give the config.json from before",
        ),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            'write ["LlamaForCausalLM"] to train',
        ),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "no causal language model"),
        (LLAMA | {"attention_bias": True}, "attention_bias = true: with mlp_bias = false is not supported"),
        (LLAMA | {"mlp_bias": True}, "attention_bias = false: with mlp_bias = true is not supported"),
        (LLAMA | {"attention_bias": "yes"}, 'attention_bias = "yes"; write true or false'),
        (LLAMA | {"hidden_act": "gelu"}, 'hidden_act = "gelu": another activation in a gated MLP'),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: rotary embeddings of a part"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved = true: rotating neighbours"),
        (LLAMA | {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (LLAMA | {"rope_theta": "big"}, 'rope_theta = "big"; write a finite number above 0'),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps = 0; write a finite number above 0"),
        (LLAMA | {"rope_scaling": [8]}, "rope_scaling = [8]; write a mapping, or null"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor = null; write a finite number above 0"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2, "finetuned": True}},
            "rope_scaling.finetuned = true",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3}},
            "differ",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_theta": 3.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        (QWEN3 | {"attention_bias": True}, "attention_bias = true: biases in some linear layers only"),
        (QWEN2 | {"attention_bias": False}, "attention_bias = false: Qwen2 without biases"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window = 4096: attention in a window is not supported"),
        (
            WINDOWS | {"layer_types": ["linear_attention"] * 36},
            "write sliding_attention or full_attention for each of the 36 layers",
        ),
        (WINDOWS | {"max_window_layers": -1}, "max_window_layers = -1; write a whole number from 0"),
        (
            WINDOWS | SMALL | {"max_window_layers": 0, "sliding_window": 0},
            "sliding_window = 0; write a whole number above 0",
        ),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts = 0; write a whole number above 0"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "experts: active = 9 of 8 experts; give a number up to 8"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: noise in what routers see"),
        (MIXTRAL | {"num_experts": 4}, "num_experts = 4 and num_local_experts = 8 mean the same field"),
        (
            QWEN3_MOE | {"mlp_only_layers": [48]},
            "mlp_only_layers = [48]; write a list of layers from 0 to 47",
        ),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0; write a whole number above 0"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 64}, "shared experts is not supported"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob = 1; write true or false"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq = 2: layers without experts among those"),
        (DEEPSEEK | {"scoring_func": "softmax"}, 'scoring_func = "softmax": another score of experts'),
        (DEEPSEEK | {"topk_method": "greedy"}, 'topk_method = "greedy": another choice of experts'),
        (DEEPSEEK | {"first_k_dense_replace": -1}, "first_k_dense_replace = -1; write a whole number from 0"),
        (
            DEEPSEEK | {"num_key_value_heads": 8},
            "num_key_value_heads = 8: differs from what the other fields",
        ),
        (DEEPSEEK | {"qk_head_dim": 128}, "qk_head_dim = 128: differs from what the other fields say"),
        (DEEPSEEK | {"n_shared_experts": None}, "n_shared_experts = null; write a whole number above 0"),
        (DEEPSEEK | {"routed_scaling_factor": 0}, "routed_scaling_factor = 0; write a finite number above 0"),
        (
            DEEPSEEK | {"quantization_config": {"quant_method": "compressed-tensors"}},
            "training quantized weights is not supported",
        ),
        (GPT_OSS | {"attention_bias": False}, "attention_bias = false: experts with biases beside"),
        (
            GPT_OSS | {"experts_per_token": 2},
            "experts_per_token = 2 and num_experts_per_tok = 4 mean the same",
        ),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit = 0; write a finite number above 0"),
        (
            GPT_OSS | {"layer_types": ["chunked_attention"] * 24},
            "write sliding_attention or full_attention for",
        ),
        (GEMMA | {"final_logit_softcapping": 30.0}, "capped logits is not supported"),
        (GEMMA | {"hidden_activation": "silu"}, 'hidden_activation = "silu": another activation'),
        (GEMMA | {"rope_local_base_freq": 0}, "rope_local_base_freq = 0; write a finite number above 0"),
        (GEMMA | {"rope_parameters": {"rope_theta": 3}}, "write a mapping with full_attention and sliding"),
        (
            GEMMA | {"query_pre_attn_scalar": "big"},
            'query_pre_attn_scalar = "big"; write a finite number above 0',
        ),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0; write a whole number above 0"),
        (VISION | {"text_config": None}, "text_config = null; write the mapping of the language model's"),
        (VISION | {"text_config": {"model_type": "llama"}}, 'text_config.model_type = "llama" in a gemma3'),
        (VISION | {"audio_config": {"a": 1}}, "audio_config ="),
        (VISION | {"architectures": ["Gemma3ForCausalLM"]}, 'write ["Gemma3ForConditionalGeneration"]'),
        (
            VISION | {"tie_word_embeddings": False, "text_config": GEMMA | {"tie_word_embeddings": True}},
            "tie_word_embeddings = false: text_config has another value; write the same in both",
        ),
        (LLAMA4 | {"no_rope_layers": [1, 0]}, "write 0 or 1 for each of the 48 layers"),
        (LLAMA4 | {"moe_layers": [-1]}, "moe_layers = [-1]; write a list of layers from 0 to 47"),
        (LLAMA4 | {"floor_scale": 0}, "floor_scale = 0; write a finite number above 0"),
        (LLAMA4 | {"use_qk_norm": 3}, "use_qk_norm = 3; write true or false"),
        (PHI3 | {"lm_head_bias": True}, "a bias of the output layer is not supported"),
        (
            PHI3 | {"partial_rotary_factor": 2},
            "partial_rotary_factor = 2: more than a head cannot be rotated",
        ),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "a scale of attention by layer is not supported"),
        (GPT2 | {"scale_attn_weights": False}, "attention without a scale is not supported"),
        (
            GPT2 | {"activation_function": "relu"},
            'activation_function = "relu"; give a model with gelu_new or',
        ),
        (
            GPT2 | {"hidden_size": 5},
            "hidden_size = 5 and n_embd = 768 mean the same field; remove one of them",
        ),
        (GPT2 | {"add_cross_attention": True}, "attention to an encoder is not supported"),
        (GPT2 | {"n_special": 3}, "n_special = 3"),
        (GPT2 | {"tie_word_embeddings": None}, "tie_word_embeddings = null; write true or false"),
    ],
)
def test_a_field_that_is_not_carried_over_is_refused_by_name(write, config, said):
    folder = write(config)
    with pytest.raises(HexiError, match=re.escape(said)) as problem:
        read_model(folder)
    assert str(folder / "config.json") in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "config",
    [
        WINDOWS,  # the first 36 of 36 layers have none
        WINDOWS | {"max_window_layers": 0, "layer_types": ["full_attention"] * 36},
        QWEN2 | {"max_window_layers": 0},
        LLAMA | {"anything": None, "attention_bias": None, "hidden_act": "swish", "num_experts": 0},
        LLAMA | {"rope_scaling": {}, "architectures": ["LLaMAForCausalLM"]},
    ],
)
def test_what_does_not_matter_is_harmless(write, config):
    assert read_model(write(config)).layers == config["num_hidden_layers"]


NANO = PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]


@pytest.mark.parametrize(
    ("config", "more"),
    [
        # Of NVIDIA's Nemotron 3 Nano, Nemotron-H-56B and Nemotron 3 Ultra as published.
        (NANO, {"norm_eps": None, "hidden_act": "relu2"}),
        (NANO, {"time_step_rank": 512, "time_step_limit": [0.0, 1e308], "mamba_n_groups": 8}),
        (QWEN2, {"use_mrope": False, "seq_length": 32768, "is_decoder": True}),
        (LLAMA, {"layer_norm_eps": 1e-6, "rotary_emb_base": 10000, "num_kv_heads": 4, "kv_channels": None}),
        (MIXTRAL, {"experts_per_token": 2}),
    ],
)
def test_a_field_that_nothing_reads_may_repeat_another(write, config, more):
    assert count(write(config | more)) == count(write(config))


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (NANO, {"norm_eps": 1e-6}, "norm_eps = 1e-06: another value than layer_norm_epsilon = 1e-05 is not"),
        (NANO, {"hidden_act": "silu"}, 'hidden_act = "silu": another value than mlp_hidden_act = "relu2"'),
        (NANO, {"mamba_dt_limit": [0.0, 1.0]}, "a limit of Mamba's step is not supported; remove it"),
        (
            QWEN2,
            {"use_mrope": True},
            "use_mrope = true: rotary positions in three dimensions is not supported",
        ),
        (LLAMA, {"num_kv_heads": 8}, "num_kv_heads = 8: another value than num_key_value_heads = 4"),
    ],
)
def test_a_field_that_nothing_reads_and_contradicts_another_is_refused(write, config, more, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        read_model(write(config | more))


@pytest.mark.parametrize("value", [10**9, 10**400, 1e308, -1, "x", [], {}], ids=range(7))
def test_any_value_of_any_field_is_read_or_refused(write, value):
    """No list is as long as a number says before it is checked, and no number is too large for a message."""
    for config in (NANO, LLAMA, QWEN3_MOE, DEEPSEEK, GPT_OSS, LLAMA4, GEMMA, GPT2):
        for field in TYPES[config["model_type"]].used:
            with contextlib.suppress(HexiError):
                read_model(write(config | {field: value}))
