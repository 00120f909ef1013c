"""Values of config.json files of published models of Qwen with vision, by model.

Each is on the model's page, https://huggingface.co/ and its key.
"""

from __future__ import annotations

from typing import Any

from tests.support.published_text import USUAL, decoder_sizes, without

_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _qwen25(*sizes: int, **more: Any) -> dict[str, Any]:
    """A file of transformers 4.41: the decoder's fields are beside the encoder's mapping."""
    return {
        **without(USUAL, "attention_bias"),
        **_IDS,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3456 if sizes[0] == 8192 else 3420,
            "model_type": "qwen2_5_vl",
            "num_heads": 16,
            "out_hidden_size": sizes[0],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
        "vision_token_id": 151654,
        **decoder_sizes(*sizes),
        **more,
    }


def _qwen3(kind: str, architecture: str, *sizes: int, **text: Any) -> dict[str, Any]:
    return {
        **_IDS,
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 262144,
            "model_type": f"{kind}_text",
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "use_cache": True,
            **decoder_sizes(*sizes),
            **text,
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": kind,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": sizes[0],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


VISION: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen25(2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen25(3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-VL-72B-Instruct": _qwen25(8192, 29568, 80, 64, 8, 152064),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", 4096, 12288, 36, 32, 8, 151936
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _qwen3(
        *("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", 2048, 6144, 48, 32, 4, 151936),
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
    ),
}
