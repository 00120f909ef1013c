"""Encoders of images: their weights against transformers', and what a config.json may say of them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_hexi.errors import HexiError
from megatron_hexi.models import read_model
from tests.support.published_vision import VISION

QWEN25, QWEN3 = VISION["Qwen/Qwen2.5-VL-7B-Instruct"], VISION["Qwen/Qwen3-VL-8B-Instruct"]
#: The sizes of Qwen/Qwen2-VL-7B-Instruct.
QWEN2 = QWEN25 | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def changed(config, **vision):
    return config | {"vision_config": config["vision_config"] | vision}


@pytest.fixture
def read(tmp_path):
    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path)

    return read


@pytest.mark.parametrize(
    "config",
    [
        *VISION.values(),
        QWEN2,
        changed(QWEN2, embed_dim=64, mlp_ratio=3, depth=2),
        changed(QWEN25, hidden_size=96, window_size=56, num_heads=4, patch_size=7),
        changed(QWEN3, deepstack_visual_indexes=[1], num_position_embeddings=256, temporal_patch_size=1),
        changed(QWEN3, deepstack_visual_indexes=[], spatial_merge_size=3),
    ],
)
def test_weights_are_those_of_transformers(read, config):
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    assert sum(read(config).encoder_params()) == sum(
        weight.numel() for weight in whole.model.visual.parameters()
    )


def test_windows_are_those_of_transformers(read):
    vision = read(QWEN25).vision
    assert (vision.window, vision.full_layers, vision.tokens(64)) == (64, 4, 16)  # 112 / 14 squared
    assert read(QWEN3).vision.window == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(QWEN25, out_hidden_size=8), "out_hidden_size = 8: differs from the decoder's width"),
        (changed(QWEN25, depth=0), "vision_config: depth = 0; write a whole number above 0"),
        (changed(QWEN3, deepstack_visual_indexes=[27]), "write a list of layers from 0 to 26"),
        (changed(QWEN3, num_heads=7), "heads = 7 does not divide hidden_size = 1152"),
        (changed(QWEN3, pooling=1), "vision_config: pooling = 1: .* has no such field"),
        (QWEN3 | {"vision_config": 3}, "vision_config = 3; write the mapping"),
    ],
)
def test_what_is_wrong_is_said(read, config, words):
    with pytest.raises(HexiError, match=words):
        read(config)


def test_a_model_without_an_encoder_has_no_such_weights():
    assert read_model("qwen3-8b").encoder_params() == (0, 0)
