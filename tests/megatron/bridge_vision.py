"""Small models of Megatron Bridge with vision, on random images of random sizes among random texts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.bridge.data.builders import mock_vlm_sft
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch.nn import functional
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WINDOWS: dict[str, Any] = {"window_size": 16, "fullatt_block_indexes": [1]}
FEATURES: dict[str, Any] = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
START, IMAGE, VIDEO = 125, 126, 127
attention: Any = functional.scaled_dot_product_attention
FIELDS: dict[str, Any] = {
    "position_embedding_type": "mrope",
    "mrope_section": [4, 2, 2],
    "vision_start_token_id": START,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts with two images each, of several sizes."""

    def __init__(self, samples: int, length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(index)
        grids = torch.randint(1, 5, (2, 3), generator=random) * 2  # sides in patches, which are merged by 2
        grids[:, 0] = 1
        words: list[torch.Tensor] = []
        for grid in grids:
            text = torch.randint(1, START, (7 + index % 5,), generator=random)
            image = torch.full((int(grid.prod()) // 4,), IMAGE)
            words += [text, torch.tensor([START]), image]
        words.append(torch.randint(1, START, (9,), generator=random))
        tokens = torch.cat(words)[: self._length]
        pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=random)
        return {"tokens": tokens, "grids": grids, "pixels": pixels}

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = torch.zeros(len(samples), self._length, dtype=torch.int64)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample["tokens"])] = sample["tokens"]
        labels = torch.nn.functional.pad(rows[:, 1:], (0, 1))
        return {
            "input_ids": rows,
            "labels": labels,
            "loss_mask": ((labels > 0) & (labels < START)).float(),
            "position_ids": torch.arange(self._length).expand(len(samples), -1),
            "visual_inputs": GenericVisualInputs(
                pixel_values=torch.cat([sample["pixels"] for sample in samples]),
                image_grid_thw=torch.cat([sample["grids"] for sample in samples]),
            ),
        }


def qwen25(**fields: Any) -> Qwen25VLModelProvider:
    """Return the configuration of a Qwen2.5-VL."""
    vision = Qwen2_5_VLVisionConfig(**VISION, **WINDOWS)
    return Qwen25VLModelProvider(vision_config=vision, **(fields | FIELDS), add_qkv_bias=True)


def qwen3(**fields: Any) -> Qwen3VLModelProvider:
    """Return the configuration of a Qwen3-VL, whose first two layers add features of the encoder's."""
    return _qwen3(Qwen3VLModelProvider, fields)


def qwen3_experts(**fields: Any) -> Qwen3VLMoEModelProvider:
    """Return the configuration of a Qwen3-VL with experts."""
    frozen = ("freeze_language_model", "freeze_vision_model", "moe_permute_fusion")
    return _qwen3(Qwen3VLMoEModelProvider, fields | dict.fromkeys(frozen, False))


def _qwen3(provider: Any, fields: dict[str, Any]) -> Any:
    TEDotProductAttention.__init__, TEDotProductAttention.forward = _hold, _attend
    vision = Qwen3VLVisionConfig(**VISION, **FEATURES)
    return provider(vision_config=vision, **(fields | FIELDS), bias_activation_fusion=False)


def _hold(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    torch.nn.Module.__init__(self)
    self.config, self._tp_group = config, kwargs["pg_collection"].tp


def _attend(
    self: Any, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Attend as Transformer Engine, which is not emulated: within images, or to earlier tokens."""
    if packed_seq_params is None:
        rows = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        return attention(*rows, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
    ends = packed_seq_params.cu_seqlens_q.tolist()
    images = (
        attention(*(one[first:end].transpose(0, 1) for one in (query, key, value)))
        for first, end in itertools.pairwise(ends)
    )
    return torch.cat([image.transpose(0, 1) for image in images]).flatten(1)


def show_images(config: ConfigContainer) -> None:
    """Let a configuration train on `Images`."""
    length = config.model.seq_length
    # Images have no loss: a mean over micro-batches would not be the plan's mean over tokens.
    config.model.calculate_per_token_loss, config.ddp.average_in_collective = True, False
    config.dataset = mock_vlm_sft.MockVLMSFTDatasetConfig(
        seq_length=length, hf_processor_path="none", num_workers=0
    )

    def build(self: Any, context: Any) -> tuple[Images, Images, None]:
        return Images(context.train_samples, length), Images(context.valid_samples, length), None

    mock_vlm_sft.MockVLMSFTDatasetBuilder.build = build
