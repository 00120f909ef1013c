"""Rotary embeddings of a config.json: Megatron's flags give transformers' frequencies, or are refused."""

from __future__ import annotations

import argparse
import re

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_hexi.errors import NoFlagError
from megatron_hexi.models import constant_flags, read_model
from tests.support.published_configs import PUBLISHED
from tests.unit.models.test_hugging_face import LLAMA, without


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
