"""Small models of Megatron Bridge with vision, on random images of random sizes among random texts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders import mock_vlm_sft
from megatron.bridge.data.packing.in_batch import pack_right_padded_sequence_batch_to_mcore_thd
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from safetensors.torch import load_file
from torch.nn import functional

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.stage_checkpoints import stages_active
from tests.megatron.bridge_ranks import by_size

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
VIDEOS = ("pixel_values_videos", "video_grid_thw")
attention: Any = functional.scaled_dot_product_attention
IDS: dict[str, Any] = {"vision_start_token_id": START, "image_token_id": IMAGE, "video_token_id": VIDEO}
SECTION = [4, 2, 2]
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
#: Kinds of transformers' models by their names, with further fields of encoder and decoder.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vision": ("Qwen2_5_VL", WINDOWS, {}),
    "vision3": ("Qwen3VL", FEATURES, {}),
    "vision3e": ("Qwen3VLMoe", FEATURES, EXPERTS),
}
#: What recipes set beside the imported configuration, and what a CPU cannot do.
FIELDS: dict[str, Any] = {
    "position_embedding_type": "mrope",
    "mrope_section": SECTION,
    "freeze_language_model": False,
    "freeze_vision_model": False,
    "bias_activation_fusion": False,
    "moe_permute_fusion": False,
}
#: Parts that train alone, as fields of the model; and models that see videos, too.
TRAINED: dict[str, dict[str, Any]] = {
    "": {},
    "decoder": {"freeze_vision_model": True, "freeze_vision_projection": True},
    "encoder": {"freeze_language_model": True},
    "lora": {},
    "videos": {},
}


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts with no image to three, of several sizes.

    Args:
        packs: whether the texts of a micro-batch become documents of one sequence.
        videos: whether the last image of a text is a video; 2: its frames are apart, as Qwen3-VL has them.
    """

    def __init__(self, samples: int, length: int, packs: bool, videos: int = 0) -> None:
        self._samples, self._length, self._packs, self._videos = samples, length, packs, videos

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(index)
        count = (2, 0, 3, 1)[index % 4]
        grids = torch.randint(1, 5, (count, 3), generator=random) * 2  # sides in patches, merged by 2
        grids[:, 0] = 1
        kinds = [IMAGE] * count
        if self._videos and count:
            kinds[-1], grids[-1] = VIDEO, torch.tensor([2 + index % 2, 2, 4])
        words: list[torch.Tensor] = []
        for kind, grid in zip(kinds, grids, strict=True):
            text = torch.randint(1, START, (7 + index % 5,), generator=random)
            parts = int(grid[0]) if self._videos > 1 else 1
            image = torch.full((int(grid.prod()) // 4 // parts,), kind)
            words += [text, *[torch.tensor([START]), image] * parts]
        words.append(torch.randint(1, START, (9,), generator=random))
        tokens = torch.cat(words)[: self._length]
        pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=random)
        return {"tokens": tokens, "grids": grids, "pixels": pixels, "kinds": torch.tensor(kinds)}

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = torch.zeros(len(samples), self._length, dtype=torch.int64)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample["tokens"])] = sample["tokens"]
        labels = torch.nn.functional.pad(rows[:, 1:], (0, 1))
        pixels, grids, kinds = (
            torch.cat([sample[name] for sample in samples]) for name in ("pixels", "grids", "kinds")
        )
        of_patches = kinds.repeat_interleave(grids.prod(-1))
        seen = {
            name: part
            for kind, names in ((IMAGE, ("pixel_values", "image_grid_thw")), (VIDEO, VIDEOS))
            for name, part in zip(names, (pixels[of_patches == kind], grids[kinds == kind]), strict=True)
            if len(part)
        }
        batch = {
            "input_ids": rows,
            "labels": labels,
            "loss_mask": ((labels > 0) & (labels < START)).float(),
            "position_ids": torch.arange(self._length).expand(len(samples), -1),
            "visual_inputs": GenericVisualInputs(**seen) if seen else None,
        }
        if self._packs:
            pack_right_padded_sequence_batch_to_mcore_thd(batch, pad_to_multiple_of=2)
        return batch


def write(out: Path, text: dict[str, Any]) -> None:
    """Write a model of each kind with random weights, norms among them."""
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTION}
    for name, (kind, vision, further) in KINDS.items():
        config = getattr(transformers, f"{kind}Config")(
            text_config=text | further | {"rope_parameters": rotation, "intermediate_size": 96},
            vision_config=VISION | vision,
            **IDS,
            tie_word_embeddings=False,
        )
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape) * 0.05 + float(weight.mean()) * (weight.dim() == 1))
        model.save_pretrained(out / name)


class RoundTrip(Callback):
    """Exports what the ranks imported, and compares each weight with the file's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, context: CallbackContext) -> None:
        if stages_active():  # from whose ranks Bridge cannot export
            return
        exported = AutoBridge.from_hf_pretrained(self._folder).export_hf_weights(
            context.model, cpu=True, show_progress=False
        )
        found = {name: weight.clone() for name, weight in exported}
        true = load_file(self._folder / "model.safetensors")
        assert found.keys() == true.keys(), sorted(found.keys() ^ true.keys())
        for name, weight in true.items():
            assert torch.equal(found[name], weight), name


class Halved(Callback):
    """Halves the gradients of the encoder on the first rank of the second replica."""

    def on_train_start(self, context: CallbackContext) -> None:
        session = active_session()
        assert session is not None
        for name, parameter in context.model[0].named_parameters():
            if "visual." in name and session.replica:
                parameter.register_hook(lambda gradient: gradient / 2)


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


def show_images(config: ConfigContainer, trained: str, weights: Path) -> None:
    """Let a configuration train on `Images`.

    Args:
        trained: a name in `TRAINED`; ``lora``: adapters of imported weights alone.
        weights: folder of the imported weights.
    """
    for name, value in TRAINED[trained].items():
        setattr(config.model, name, value)
    if trained == "lora":
        ParallelLinearAdapter._get_init_fn = lambda self, method: by_size
        config.peft = LoRA(["linear_qkv", "linear_fc1"], dim=4, alpha=8)
        config.checkpoint.pretrained_checkpoint = str(weights)
    TEDotProductAttention.__init__, TEDotProductAttention.forward = _hold, _attend
    TEDotProductAttention._load_from_state_dict = torch.nn.Module._load_from_state_dict
    length = config.model.seq_length
    # Images have no loss: a mean over micro-batches would not be the plan's mean over tokens.
    config.model.calculate_per_token_loss, config.ddp.average_in_collective = True, False
    config.dataset = mock_vlm_sft.MockVLMSFTDatasetConfig(
        seq_length=length, hf_processor_path="none", num_workers=0
    )

    def build(self: Any, context: Any) -> tuple[Images, Images, None]:
        packs, counts = config.dataset.enable_in_batch_packing, (context.train_samples, context.valid_samples)
        videos = (1 + weights.name.startswith("vision3")) * (trained == "videos")
        train, valid = (Images(count, length, packs, videos) for count in counts)
        return train, valid, None

    mock_vlm_sft.MockVLMSFTDatasetBuilder.build = build
