"""config.json files: weights and rotary frequencies against transformers, and every field accounted for."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_hexi.cost import NoFlagError, constant_flags, read_model
from megatron_hexi.cost.hugging_face_fields import HARMLESS, HARMLESS_FIELDS, NEEDED, ONLY
from megatron_hexi.cost.hugging_face_types import TYPES
from megatron_hexi.errors import HexiError
from tests.support.published_configs import PUBLISHED
from tests.support.published_layers import COUNTED, PUBLISHED_LAYERS


@pytest.fixture
def write(tmp_path):
    """Writes a config.json and returns its folder."""

    def write_(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_


def count_by_transformers(folder):
    """Weights of transformers' own model, which has no memory on the meta device; shared ones once."""
    text = json.loads((folder / "config.json").read_text())
    # transformers leaves Kimi K2 to code of its own, which is DeepSeek-V3's.
    known = {name: value for name, value in text.items() if name not in ("auto_map", "quantization_config")}
    known["model_type"] = known["model_type"].replace("kimi_k2", "deepseek_v3")
    config = AutoConfig.for_model(**known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    biases = [bias.numel() for name, bias in model.named_buffers() if name.endswith("score_correction_bias")]
    return sum(weight.numel() for weight in model.parameters()) + sum(biases)


def count(folder):
    """Weights of our model without the rows that Megatron adds to the vocabulary."""
    return count_of(read_model(folder))


def count_of(model):
    """Weights of a model without the rows that Megatron adds to the vocabulary."""
    added = (model.padded_vocab() - model.vocab_size) * model.hidden_size
    return model.total_params - added * (1 if model.tied_embeddings else 2)


@pytest.mark.parametrize("name", (PUBLISHED | PUBLISHED_LAYERS))
def test_weights_are_those_of_transformers(write, name):
    folder = write((PUBLISHED | PUBLISHED_LAYERS)[name])
    assert count(folder) == count_by_transformers(folder)


@pytest.mark.parametrize("name", COUNTED)
def test_weights_and_active_weights_are_those_counted_by_hand(write, name):
    model = read_model(write(PUBLISHED_LAYERS[name]))
    weights, active = COUNTED[name]
    assert count_of(model) == weights
    assert model.active_params / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_of_transformers_is_accounted_for_and_defaults_are_its(model_type):
    kind = TYPES[model_type]
    config: Any = type(AutoConfig.for_model(model_type.replace("kimi_k2", "deepseek_v3")))
    known = kind.used.keys() | kind.only.keys() | kind.harmless.keys() | ONLY.keys() | HARMLESS_FIELDS
    assert set(config().to_dict()) - known == set()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(num_hidden_layers=1, vocab_size=8, pad_token_id=None))
    assert type(model).__name__ == kind.architecture
    own = inspect.signature(config).parameters
    wanted = {name: default for name, default in kind.used.items() if default is not NEEDED and name in own}
    assert {name: own[name].default for name in wanted} == wanted
    assert dict(config.attribute_map) == kind.aliases


def test_no_field_is_told_twice():
    for kind in TYPES.values():
        told = [*kind.used, *kind.only, *kind.harmless, *HARMLESS_FIELDS]
        assert len(told) == len(set(told))
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
SMALL = {"num_hidden_layers": 2}
DEEPSEEK, GPT_OSS = PUBLISHED_LAYERS["deepseek-ai/DeepSeek-V3"], PUBLISHED_LAYERS["openai/gpt-oss-20b"]
QWEN_MOE = PUBLISHED_LAYERS["Qwen/Qwen3-30B-A3B"]
SCOUT = PUBLISHED_LAYERS["meta-llama/Llama-4-Scout-17B-16E"]


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
    folder = write(config)
    assert count(folder) == count_by_transformers(folder)


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
        (LLAMA | {"rope_theta": "big"}, 'rope_theta = "big"; write a number above 0'),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps = 0; write a number above 0"),
        (LLAMA | {"rope_scaling": [8]}, "rope_scaling = [8]; write a mapping, or null"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor = null; write a number above 0"),
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
        (
            WINDOWS | {"max_window_layers": 35, "sliding_window": 0},
            "sliding_window = 0; write a whole number",
        ),
        (
            MISTRAL | {"model_type": "qwen2_moe"},
            'model_type = "qwen2_moe" is not known; known are llama, mis',
        ),
        (MISTRAL | {"model_type": "deepseek_v2"}, 'model_type = "deepseek_v2" is not known'),
        (MISTRAL | {"model_type": "qwen3_next"}, 'model_type = "qwen3_next" is not known'),
        (MISTRAL | {"model_type": "mamba2"}, 'model_type = "mamba2" is not known'),
        (DEEPSEEK | {"head_dim": 100}, "head_dim = 100: other fields make it 64; write 64"),
        (DEEPSEEK | {"scoring_func": "softmax"}, 'scoring_func = "softmax": another score of experts'),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq = 2: dense layers between those with experts"),
        (DEEPSEEK | {"first_k_dense_replace": -1}, "first_k_dense_replace = -1; write a whole number from 0"),
        (GPT_OSS | {"experts_per_token": 2}, "experts_per_token = 2: other fields make it 4; write 4"),
        (
            GPT_OSS | {"num_experts_per_tok": 64, "experts_per_token": 64},
            "experts: active = 64 of 32 experts",
        ),
        (
            QWEN_MOE | {"mlp_only_layers": [48]},
            "mlp_only_layers = [48]; write a list of layers, from 0 to 47",
        ),
        (SCOUT | {"text_config": None}, "text_config = null; write the language model's fields"),
        (SCOUT | {"tie_word_embeddings": True}, "tie_word_embeddings differs from text_config's"),
        (SCOUT | {"audio_config": {}}, "audio_config = {}: transformers' llama4_text has no such field"),
        (
            SCOUT | {"text_config": SCOUT["text_config"] | {"no_rope_layers": [1, 0]}},
            "no_rope_layers = [1, 0]; write 0 or 1 for each of the 48 layers",
        ),
        (
            WINDOWS | {"layer_types": ["linear_attention"] * 36},
            "write full_attention or sliding_attention for each of the 36 layers",
        ),
        (WINDOWS | {"max_window_layers": -1}, "max_window_layers = -1; write a whole number from 0"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "a scale of attention by layer is not supported"),
        (GPT2 | {"scale_attn_weights": False}, "attention without a scale is not supported"),
        (
            GPT2 | {"activation_function": "relu"},
            'activation_function = "relu"; give a model with gelu_new or',
        ),
        (GPT2 | {"hidden_size": 5}, "hidden_size = 5 and n_embd = 768 are one field; remove one of them"),
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


def megatron_frequencies(folder, head_dim):
    """Frequencies, and the factor on sines and cosines, as Megatron computes them from the printed flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rotary-base", type=int)
    parser.add_argument("--position-embedding-type", default="rope")
    parser.add_argument("--rotary-seq-len-interpolation-factor", type=int, default=1)
    parser.add_argument("--yarn-original-max-position-embeddings", type=int)
    parser.add_argument("--use-rope-scaling", action="store_true")
    parser.add_argument("--no-yarn-correction-range-round-to-int", action="store_true")
    for name in ("rotary-scaling-factor", "yarn-beta-fast", "yarn-beta-slow", "mscale", "mscale-all-dim"):
        parser.add_argument(f"--{name}", type=float)
    given, _ = parser.parse_known_args(constant_flags(folder))
    base = 1.0 / given.rotary_base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if given.use_rope_scaling:
        return RotaryEmbedding._apply_scaling(None, base, factor=8), 1.0
    if given.position_embedding_type == "rope":
        return base / given.rotary_seq_len_interpolation_factor, 1.0
    low, high = yarn._yarn_find_correction_range(
        given.yarn_beta_fast,
        given.yarn_beta_slow,
        head_dim,
        given.rotary_base,
        given.yarn_original_max_position_embeddings,
        not given.no_yarn_correction_range_round_to_int,
    )
    mask = 1 - yarn._yarn_linear_ramp_mask(low, high, head_dim // 2, torch.device("cpu"))
    factor = yarn._yarn_get_concentration_factor(
        given.rotary_scaling_factor, given.mscale, given.mscale_all_dim
    )
    return base / given.rotary_scaling_factor * (1 - mask) + base * mask, factor


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = PUBLISHED["Llama-3.1-70B"]["rope_scaling"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        {"rope_scaling": YARN, "rope_theta": 1000000},
        {"rope_scaling": {"type": "yarn", "factor": 16.0, "beta_fast": 24, "beta_slow": 2.0}},
        {"rope_scaling": YARN | {"attention_factor": 0.8}},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
        {"rope_scaling": YARN | {"mscale": 0.7}},
        {"rope_scaling": YARN | {"factor": 1.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
        {"rope_parameters": YARN | {"rope_theta": 20000.0}},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(write, change):
    head_dim = 64
    folder = write(LLAMA | {"max_position_embeddings": 8192} | change)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim = head_dim
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        wanted = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        wanted = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    found = megatron_frequencies(folder, head_dim)
    torch.testing.assert_close(found[0], wanted[0].float(), rtol=2e-6, atol=0)
    assert found[1] == pytest.approx(wanted[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rope_scaling": LLAMA3 | {"factor": 32.0}},
            "rope_scaling.factor = 32.0: Megatron's --use-rope-scaling has 8.0",
        ),
        (
            {"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
            "original_max_position_embeddings = 8193",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            'rope_scaling.type = "dynamic": Megatron computes default',
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            'rope_scaling.rope_type = "longrope"',
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 'rope_scaling.rope_type = ["yarn"]'),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "rope_scaling.factor = 2.5: Megatron's"),
        (
            {"rope_scaling": YARN | {"factor": 0.5, "attention_factor": 2.0}},
            "attention_factor = 2.0: Megatron has 1",
        ),
        ({"rope_theta": 10000.5}, "rope_theta = 10000.5: Megatron's --rotary-base is a whole number"),
    ],
)
def test_a_constant_that_megatron_lacks_is_named_and_the_shapes_are_read(write, change, said):
    folder = write(LLAMA | {"max_position_embeddings": 8193} | change)
    assert read_model(folder).layers == 22
    with pytest.raises(NoFlagError, match=re.escape(said)):
        constant_flags(folder)
