"""Models with layers that have a state: their description, weights and flags."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import DeltaNet, Experts, Mamba, ShortConv, Window
from megatron_hexi.models import Model, read_model
from tests.support.plans import examples
from tests.support.published_hybrids import HYBRIDS

QWEN, NEMOTRON, LFM2, LFM2_MOE = (
    HYBRIDS[name]
    for name in (
        *("Qwen/Qwen3-Next-80B-A3B-Instruct", "nvidia/Nemotron-H-8B-Base-8K"),
        *("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-8B-A1B"),
    )
)
MAMBA, DELTA = Mamba(8, 16, 2, 32), DeltaNet(8, 16, 4, 24)
PLAIN = Model("plain", 4, 64, 4, 2, 16, 96, False, 1000, False)
COUNTS = st.integers(1, 5)


def count_by_transformers(config):
    """Weights of transformers' model, biases of routers among them, by layer and in all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    biases = [
        tensor
        for name, tensor in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    ]
    return sum(weight.numel() for weight in [*model.parameters(), *biases])


@st.composite
def qwen_configs(draw):
    layers, groups = draw(st.integers(1, 6)), draw(COUNTS)
    return QWEN | {
        "num_hidden_layers": layers,
        "hidden_size": 8 * draw(COUNTS),
        "intermediate_size": 8 * draw(COUNTS),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 8 * draw(COUNTS),
        "vocab_size": 64 * draw(COUNTS),
        "full_attention_interval": draw(COUNTS),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * draw(COUNTS),
        "linear_key_head_dim": 4 * draw(COUNTS),
        "linear_value_head_dim": 4 * draw(COUNTS),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8 * draw(COUNTS),
        "shared_expert_intermediate_size": 8 * draw(COUNTS),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), unique=True)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def nemotron_configs(draw):
    groups, pattern = draw(COUNTS), draw(st.text("M*-E", min_size=1, max_size=6))
    own = {key: value for key, value in NEMOTRON.items() if key != "attention_head_dim"}
    return own | {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": 8 * draw(COUNTS),
        "intermediate_size": 8 * draw(COUNTS),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 8 * draw(COUNTS),
        "vocab_size": 64 * draw(COUNTS),
        "n_groups": groups,
        "mamba_num_heads": groups * draw(COUNTS),
        "mamba_head_dim": 4 * draw(COUNTS),
        "ssm_state_size": 4 * draw(COUNTS),
        "conv_kernel": draw(st.integers(2, 5)),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8 * draw(COUNTS),
        "moe_shared_expert_intermediate_size": 8 * draw(COUNTS),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def lfm2_configs(draw):
    layers = draw(st.integers(1, 6))
    hidden = 32 * draw(COUNTS)
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "vocab_size": 64 * draw(COUNTS),
        "conv_L_cache": draw(st.integers(1, 5)),
        "layer_types": draw(
            st.lists(st.sampled_from(["conv", "full_attention"]), min_size=layers, max_size=layers)
        ),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8 * draw(COUNTS)}
        bias = {"use_expert_bias": draw(st.booleans()), "num_dense_layers": draw(st.integers(0, 7))}
        return LFM2_MOE | sizes | experts | bias | {"intermediate_size": 8 * draw(COUNTS)}
    repeated = {"block_dim", "conv_dim", "conv_dim_out", "num_heads", "full_attn_idxs"}
    return (
        {name: value for name, value in LFM2.items() if name not in repeated}
        | sizes
        | {
            "block_ff_dim": draw(st.integers(1, 500)),
            "block_multiple_of": draw(COUNTS),
            "block_ffn_dim_multiplier": draw(st.sampled_from([0.7, 1, 1.3])),
            "block_auto_adjust_ff_dim": draw(st.booleans()),
        }
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrids") / "config.json"


@given(st.one_of(qwen_configs(), nemotron_configs(), lfm2_configs()))
@examples(25)
def test_weights_are_those_of_transformers(path, config):
    path.write_text(json.dumps(config))
    model = replace(read_model(path), vocab_multiple=1)
    assert model.total_params == count_by_transformers(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern is missing; add it"),
        ({"hybrid_override_pattern": "M-D"}, 'hybrid_override_pattern = "M-D"; write a letter a layer'),
        ({"num_hidden_layers": 51}, "num_hidden_layers = 51: differs from the pattern's number of layers"),
        ({"layers_block_type": ["mamba"]}, "differs from layers_block_type; remove it"),
        ({"layers_block_type": ["rnn"]}, 'layers_block_type = ["rnn"]; write a list of linear_attention'),
        ({"use_conv_bias": False}, "use_conv_bias = false: a convolution without bias is not supported"),
        ({"num_nextn_predict_layers": 1}, "multi-token prediction of a hybrid is not supported; set it to 0"),
        ({"n_groups": 3}, "state: groups = 3 does not divide the 128 heads; give a number that does"),
    ],
)
def test_what_a_config_cannot_say_is_refused_by_name(path, changes, said):
    path.write_text(json.dumps(NEMOTRON | changes))
    with pytest.raises(HexiError, match=re.escape(said)):
        read_model(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv_bias": True}, "conv_bias = true: biases of short convolutions is not supported"),
        ({"layer_types": ["conv"] * 15}, "write conv or full_attention for each of the 16 layers"),
        ({"layer_types": ["conv"] * 16}, "full_attn_idxs = [2, 5, 8, 10, 12, 14]: differs from layer_types"),
        ({"conv_dim": 1024}, "conv_dim = 1024: another value than hidden_size = 2048 is not supported"),
        ({"conv_L_cache": 0}, "conv_L_cache = 0; write a whole number above 0"),
    ],
)
def test_what_an_lfm2_cannot_say_is_refused_by_name(path, changes, said):
    path.write_text(json.dumps(LFM2 | changes))
    with pytest.raises(HexiError, match=re.escape(said)):
        read_model(path)


def test_published_lfm2_have_their_sizes(path):
    for config, billions in ((LFM2, 1.17), (LFM2_MOE, 8.34)):
        path.write_text(json.dumps(config))
        model = read_model(path)
        assert model.total_params == count_by_transformers(config)
        assert model.total_params / 1e9 == pytest.approx(billions, abs=0.01)
        assert model.pattern[:8] == "C-C-*-C-" if config is LFM2 else "C-C-*EC"
        assert model.qk_norm
        assert model.gated
        assert model.short_conv == ShortConv(3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"state": MAMBA, "pattern": "M*-"}, "has 3 letters, but the model has 4 layers; give one for each"),
        ({"state": MAMBA, "pattern": "M*-G"}, "'G': use *, -, M, or describe its part"),
        ({"pattern": "M*-*"}, "'M': use *, -, or describe its part"),
        ({"state": DELTA, "pattern": "*-*-"}, "has no G; leave state out"),
        ({"experts": Experts(4, 2, 8), "pattern": "*-*-"}, "has no E; leave experts out"),
        ({"window": Window(8), "pattern": "*-*-"}, "does not work with window, latent"),
        ({"state": {**vars(MAMBA), "kind": "rwkv"}}, "state: kind = 'rwkv'; write mamba or delta"),
        (
            {"state": replace(DELTA, layers=(True, False))},
            "state: layers has 2 entries, but the model has 4 layers",
        ),
    ],
)
def test_layers_that_contradict_each_other_are_refused_by_name(fields, said):
    with pytest.raises(HexiError, match=re.escape(said)):
        replace(PLAIN, **fields)


def test_each_kind_of_layer_has_its_own_parts_only():
    model = replace(PLAIN, layers=6, state=MAMBA, experts=Experts(4, 2, 8), pattern="M*-EM*")
    kinds = {kind.pattern: kind for kind in model.kinds}
    assert list(kinds) == ["MM", "**", "-", "E"]
    parts = [
        (kind.mixer.attends, kind.feed_forward in kind.parts, kind.state is not None)
        for kind in kinds.values()
    ]
    assert parts == [
        (False, False, True),
        (True, False, False),
        (False, True, False),
        (False, True, False),
    ]
    assert [kind.experts is not None for kind in kinds.values()] == [False, False, False, True]
    # One norm a layer, beside the part itself.
    assert kinds["-"].layer_params() == 2 * 64 * 96 + 64
    assert model.layers_before[0] == (0, 1, 1, 1, 1, 2, 2)


@pytest.mark.parametrize("state", [MAMBA, DELTA])
def test_tensor_parallel_ranks_share_all_but_norms(state):
    model = replace(PLAIN, state=state)
    shared = 2 * 64 + (0 if state.kind == "mamba" else state.head_dim)
    assert 2 * (model.layer_params(2) - shared) == model.layer_params() - shared
