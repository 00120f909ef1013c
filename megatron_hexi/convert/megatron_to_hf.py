"""Convert a torch_dist checkpoint to Hugging Face's format."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.training.checkpointing import get_checkpoint_tracker_filename
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hexi.convert.config import ConvertedModel, read_model
from megatron_hexi.convert.hf_to_megatron import sharded
from megatron_hexi.convert.parts import Weight
from megatron_hexi.convert.weights import weights_of
from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.checkpoint_files import CHECKPOINT_FILE_PATCHES, lacks, why_unreadable
from megatron_hexi.megatron.folders import iteration_folder, tracked_iteration
from megatron_hexi.megatron.saved_tensors import saved_tensors
from megatron_hexi.patching import PatchSet

#: What describes a model beside its weights, where it is there.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def convert(checkpoint: Path, like: Path, out: Path) -> None:
    """Write model.safetensors into an empty folder, with config.json and tokenizer of the original model.

    Weights keep the precision that they have in the checkpoint. Rows of padding are left out.

    Args:
        checkpoint: a folder as ``--save`` writes it (the latest iteration is taken), or one iteration in it.

    Raises:
        HexiError: the checkpoint is not in the format torch_dist, or does not hold the model of config.json.
    """
    model = read_model(like)
    folder = _iteration(checkpoint)
    with _reading(folder):
        tensors = _tensors(model, folder, like)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in _BESIDE:
        if (like / name).is_file():
            shutil.copyfile(like / name, out / name)


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors about a checkpoint's files into a `HexiError`, and run no program that they name."""
    if damage := lacks(folder):
        raise _unreadable(folder, damage)
    patches = PatchSet(CHECKPOINT_FILE_PATCHES)
    patches.install()
    try:
        yield
    except (Exception, CheckpointException) as problem:  # torch's is a BaseException
        if damage := why_unreadable(problem):
            raise _unreadable(folder, damage) from None
        raise
    finally:
        patches.remove()


def _unreadable(folder: Path, damage: str) -> HexiError:
    return HexiError(
        f"{folder}: no readable torch_dist checkpoint: {damage}; copy it again, or save with --ckpt-format "
        "torch_dist"
    )


def _tensors(model: ConvertedModel, folder: Path, like: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in Hugging Face's format, by name."""
    held = saved_tensors(folder)
    weights = weights_of(model, keys_by_layer="decoder.layers.0.self_attention.linear_proj.weight" in held)
    targets = {}
    for place, weight in enumerate(weights):
        key = next((key for key in (weight.key, *weight.same_as) if key in held), None)
        if key is None:
            raise HexiError(
                f"{folder}: holds no {weight.key}, which {like / 'config.json'} asks for; check both"
            )
        shape, dtype = held[key]
        _check_shape(weight, shape, folder, like)
        own_shape = shape if weight.layer is None else shape[1:]
        targets[str(place)] = sharded(key, weight, torch.empty(own_shape, dtype=dtype))
    known = {key for weight in weights for key in (weight.key, *weight.same_as)}
    unknown = sorted(set(held) - known)
    unknown = [key for key in unknown if key.startswith(("embedding.", "decoder.", "output_layer.", "mtp."))]
    if unknown:
        raise HexiError(
            f"{folder}: {unknown[0]}: {like / 'config.json'} asks for no such weight; check model_type"
        )

    loaded = dist_checkpointing.load(targets, str(folder))
    tensors: dict[str, torch.Tensor] = {}
    for place, weight in enumerate(weights):
        tensors |= weight.split(loaded.pop(str(place)))
    return tensors


def _check_shape(weight: Weight, shape: tuple[int, ...], folder: Path, like: Path) -> None:
    expected = weight.shape if weight.layer is None else (weight.layer[1], *weight.shape)
    is_padded = weight.is_vocabulary and shape[0] >= expected[0] and shape[1:] == expected[1:]
    if shape != expected and not is_padded:
        raise HexiError(
            f"{folder}: {weight.key} has shape {shape}, "
            f"{like / 'config.json'} asks for {expected}; check both"
        )


def _iteration(checkpoint: Path) -> Path:
    latest = tracked_iteration(str(checkpoint))
    if latest is None:
        return checkpoint
    if isinstance(latest, str) and latest != "release":
        raise HexiError(
            f"{get_checkpoint_tracker_filename(str(checkpoint))}: {latest[:40]!r} is not an iteration; give "
            "one of its folders, as iter_0000500"
        )
    return iteration_folder(checkpoint, latest)
