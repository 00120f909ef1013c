"""Convert Hugging Face weights to a checkpoint that Megatron's ``--load`` takes, under any plan."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.training.arguments import add_megatron_arguments
from megatron.training.checkpointing import get_checkpoint_tracker_filename
from safetensors import SafetensorError, safe_open

from megatron_hexi.convert.config import DenseModel, read_model
from megatron_hexi.convert.weights import Weight, weights_of
from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import write_text_atomically

#: Layers whose kernels may keep state of their own (fp8 scales); Megatron asks for it, and it is empty.
_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def convert(source: Path, out: Path) -> None:
    """Write a checkpoint and ``model.args``, Megatron's arguments for the model, into an empty folder.

    Weights keep their precision. Rows that Megatron adds to the vocabulary are not in the checkpoint: a job
    that adds rows starts them at zero.

    Args:
        source: a folder with config.json and safetensors files.
        out: the folder, as ``--load`` takes it.

    Raises:
        HexiError: the model is not one that is converted, or its weights do not fit its config.json.
    """
    model = read_model(source)
    weights = weights_of(model)
    places = _places(source, {name for weight in weights for name, _ in weight.parts}, model)
    release = out / "release"  # Megatron's name for weights that come from no training of its own
    release.mkdir()
    arguments = model.megatron_arguments()
    words = [word for pair in arguments for word in pair if word]
    state: dict[str, Any] = {
        "args": add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(words),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "model": {
            f"{weight.key}/{weight.layer}": sharded(weight, _joined(weight, places), model.shapes.layers)
            for weight in weights
        },
        "extra": _extra_state(model.shapes.layers),
    }
    dist_checkpointing.save(state, str(release))
    lines = "".join(f"{flag} {value}".rstrip() + "\n" for flag, value in arguments)
    write_text_atomically(out / "model.args", lines)
    write_text_atomically(get_checkpoint_tracker_filename(str(out)), "release")


def sharded(weight: Weight, data: torch.Tensor, layers: int) -> ShardedTensor:
    """Return a sharded tensor of a whole weight; a layer is a slice along the first dimension."""
    if weight.layer is None:
        return ShardedTensor.from_rank_offsets(weight.key, data)
    return ShardedTensor.from_rank_offsets(weight.key, data, (0, weight.layer, layers), prepend_axis_num=1)


def _extra_state(layers: int) -> dict[str, ShardedObject]:
    keys = [f"decoder.layers.{name}._extra_state" for name in _WITH_EXTRA_STATE]
    return {
        f"{key}/{layer}": ShardedObject(key, None, (layers,), (layer,))
        for key in keys
        for layer in range(layers)
    }


def _places(source: Path, needed: set[str], model: DenseModel) -> dict[str, Path]:
    """Return the file of each tensor.

    Raises:
        HexiError: there is no file, a tensor is missing, or one is left over.
    """
    places: dict[str, Path] = {}
    for path in sorted(source.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), path)
        except (OSError, SafetensorError) as problem:
            raise HexiError(
                f"{path}: not a readable safetensors file ({problem}); download it again"
            ) from None
    if not places:
        raise HexiError(f"{source}: no *.safetensors in it; save the model with save_pretrained(FOLDER)")
    missing = sorted(needed - set(places))
    if missing:
        raise HexiError(
            f"{source}: {missing[0]}, which config.json asks for, is missing, and {len(missing) - 1} more; "
            "check both"
        )
    ignored = {name for name in places if name.endswith("rotary_emb.inv_freq")}  # follows from config.json
    if model.shapes.tied_embeddings:
        ignored.add("lm_head.weight")  # a copy of the embedding
    left_over = sorted(set(places) - needed - ignored)
    if left_over:
        raise HexiError(
            f"{places[left_over[0]]}: {left_over[0]}: config.json asks for no such tensor; check model_type"
        )
    return places


def _joined(weight: Weight, places: dict[str, Path]) -> torch.Tensor:
    parts = []
    for name, shape in weight.parts:
        with safe_open(places[name], "pt") as tensors:
            part = tensors.get_tensor(name)
        if tuple(part.shape) != shape:
            raise HexiError(
                f"{places[name]}: {name} has shape {tuple(part.shape)}, "
                f"config.json asks for {shape}; check both"
            )
        parts.append(part)
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or not parts[0].is_floating_point():
        raise HexiError(
            f"{places[name]}: {name} has precision {parts[-1].dtype}; give weights of one floating precision"
        )
    return weight.join(parts)
