"""Model types of config.json that hold a language model and vision, and types of their encoders of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hexi.models.hugging_face.fields import ModelType, Only, Wrapper

_IMAGES = frozenset(
    {"vision_config", "boi_token_index", "eoi_token_index", "image_token_index"}
    | {"boi_token_id", "eoi_token_id", "image_token_id"}
)
_QWEN_IMAGES = frozenset(
    {"vision_config", "image_token_id", "video_token_id", "vision_token_id"}
    | {"vision_start_token_id", "vision_end_token_id"}
)
_QWEN2_VL: Mapping[str, Any] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
_QWEN3_VL: Mapping[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 500000.0, "head_dim": 128}
_PATCHES = {
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
#: As transformers' ``attribute_map``.
_OF_ENCODERS = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
_SAME_PATCHES = {
    # Of Qwen's own code: transformers reads in_channels and patch_size.
    "in_chans": Only((3,), "another number of channels", "write in_channels too"),
}
_ONLY_PEOPLE_READ = frozenset({"hidden_act", "initializer_range", "spatial_patch_size", "rope_parameters"})
#: The encoders of images, by the names that transformers has for ``vision_config``.
ENCODERS: Mapping[str, ModelType] = {
    "qwen2_vl_vision": ModelType(
        "Qwen2VisionTransformerPretrainedModel",
        {**_PATCHES, "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
        _SAME_PATCHES,
        _OF_ENCODERS,
        _ONLY_PEOPLE_READ,
    ),
    "qwen2_5_vl_vision": ModelType(
        "Qwen2_5_VisionTransformerPretrainedModel",
        {
            **_PATCHES,
            "depth": 32,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        _SAME_PATCHES,
        _OF_ENCODERS,
        _ONLY_PEOPLE_READ | {"tokens_per_second"},
    ),
    **dict.fromkeys(
        ("qwen3_vl_vision", "qwen3_vl_moe_vision"),
        ModelType(
            "Qwen3VLVisionModel",
            {
                **_PATCHES,
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "patch_size": 16,
                "out_hidden_size": 3584,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [8, 16, 24],
            },
            _SAME_PATCHES,
            _OF_ENCODERS,
            _ONLY_PEOPLE_READ,
        ),
    ),
}
#: The supported types whose language model is described by text_config, by name.
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        "gemma3_text",
        "Gemma3ForConditionalGeneration",
        _IMAGES | {"mm_tokens_per_image", "initializer_range"},
    ),
    "llama4": Wrapper("llama4_text", "Llama4ForConditionalGeneration", _IMAGES),
    "qwen2_vl": Wrapper(
        *("qwen2", "Qwen2VLForConditionalGeneration", _QWEN_IMAGES, "qwen2_vl_text", _QWEN2_VL),
        "qwen2_vl_vision",
    ),
    "qwen2_5_vl": Wrapper(
        *("qwen2", "Qwen2_5_VLForConditionalGeneration", _QWEN_IMAGES, "qwen2_5_vl_text", _QWEN2_VL),
        "qwen2_5_vl_vision",
    ),
    "qwen3_vl": Wrapper(
        *("qwen3", "Qwen3VLForConditionalGeneration", _QWEN_IMAGES, "qwen3_vl_text", _QWEN3_VL),
        "qwen3_vl_vision",
    ),
    "qwen3_vl_moe": Wrapper(
        "qwen3_moe",
        "Qwen3VLMoeForConditionalGeneration",
        _QWEN_IMAGES,
        "qwen3_vl_moe_text",
        {
            **_QWEN3_VL,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_local_experts": 60,
            "norm_topk_prob": True,  # transformers has no other scores
        },
        "qwen3_vl_moe_vision",
    ),
}
