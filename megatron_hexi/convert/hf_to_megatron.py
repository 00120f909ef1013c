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

from megatron_hexi.convert.config import ConvertedModel, read_model
from megatron_hexi.convert.parts import Weight
from megatron_hexi.convert.weights import weights_of
from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import write_text_atomically


def convert(source: Path, out: Path) -> None:
    """Write a checkpoint and ``model.args``, Megatron's arguments for the model, into an empty folder.

    Weights keep their precision. Rows that Megatron adds to the vocabulary are not in the checkpoint: a job
    that adds rows starts them at zero.

    Args:
        out: the folder, as ``--load`` takes it.

    Raises:
        HexiError: the model is not one that is converted, or its weights do not fit its config.json.
    """
    model = read_model(source)
    places = _places(source)
    weights = weights_of(model, places)
    _check_names(source, places, {name for weight in weights for name, _ in weight.parts}, model)
    release = out / "release"  # Megatron's name for weights that come from no training of its own
    release.mkdir()
    arguments = model.megatron_arguments()
    words = [word for pair in arguments for word in pair if word]
    state: dict[str, Any] = {
        "args": add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(words),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "model": _tensors(weights, places),
        "extra": _extra_state(weights),
    }
    dist_checkpointing.save(state, str(release))
    lines = "".join(f"{flag} {value}".rstrip() + "\n" for flag, value in arguments)
    write_text_atomically(out / "model.args", lines)
    write_text_atomically(get_checkpoint_tracker_filename(str(out)), "release")


def _tensors(weights: list[Weight], places: dict[str, Path]) -> dict[str, ShardedTensor]:
    """Return each weight under all its names."""
    tensors = {}
    for weight in weights:
        data = _joined(weight, places)
        for key in (weight.key, *weight.same_as):
            tensors[f"{key}/{weight.layer}"] = sharded(key, weight, data)
    return tensors


def sharded(key: str, weight: Weight, data: torch.Tensor) -> ShardedTensor:
    """Return a sharded tensor of a whole weight; a layer may be a slice along the first dimension."""
    if weight.layer is None:
        return ShardedTensor.from_rank_offsets(key, data)
    return ShardedTensor.from_rank_offsets(key, data, (0, *weight.layer), prepend_axis_num=1)


def _extra_state(weights: list[Weight]) -> dict[str, ShardedObject]:
    """Return state of their own that kernels of linear layers may keep (fp8 scales).

    Megatron asks for it, for each expert; it is empty.
    """
    state = {}
    for weight in weights:
        module, _, name = weight.key.rpartition(".")
        if name != "weight" or not module.rpartition(".")[2].startswith("linear_"):
            continue
        key = f"{module}._extra_state"
        number, layers = weight.layer or (0, 1)
        leading = [(number, layers)] if weight.layer or not weight.experts else []
        for expert in range(weight.experts or 1):
            at = [*leading, *([(expert, weight.experts)] if weight.experts else [])]
            shape, offset = tuple(of for _, of in at), tuple(index for index, _ in at)
            state[f"{key}/{offset}"] = ShardedObject(key, None, shape, offset)
    return state


def _places(source: Path) -> dict[str, Path]:
    """Return the file of each tensor.

    Raises:
        HexiError: there is no file, or one is not readable.
    """
    places: dict[str, Path] = {}
    for path in sorted(source.glob("*.safetensors")):
        if not path.is_file():  # of a FIFO the library waits for ever
            raise HexiError(f"{path}: no regular file; save the model with save_pretrained(FOLDER)")
        try:
            with safe_open(path, "pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), path)
        except (OSError, SafetensorError) as problem:
            raise HexiError(
                f"{path}: not a readable safetensors file ({problem}); download it again"
            ) from None
    if not places:
        raise HexiError(f"{source}: no *.safetensors in it; save the model with save_pretrained(FOLDER)")
    return places


def _check_names(source: Path, places: dict[str, Path], needed: set[str], model: ConvertedModel) -> None:
    """Check that the files have the tensors of config.json and no others.

    Raises:
        HexiError: a tensor is missing, or one is left over.
    """
    missing = sorted(needed - set(places))
    if missing:
        raise HexiError(
            f"{source}: {missing[0]}, which config.json asks for, is missing, and {len(missing) - 1} more; "
            "check both"
        )
    ignored = {name for name in places if name.endswith("rotary_emb.inv_freq")}  # follows from config.json
    if model.shapes.tied_embeddings:
        ignored.add("lm_head.weight")  # a copy of the embedding
    ignored |= _prediction_blocks(places, model)
    left_over = sorted(set(places) - needed - ignored)
    if left_over:
        raise HexiError(
            f"{places[left_over[0]]}: {left_over[0]}: config.json asks for no such tensor; check model_type"
        )


def _prediction_blocks(places: dict[str, Path], model: ConvertedModel) -> set[str]:
    """Return names of blocks of multi-token prediction, which lie behind the layers; each has an eh_proj."""
    blocks = {name.removesuffix("eh_proj.weight") for name in places if name.endswith(".eh_proj.weight")}
    behind = {f"model.layers.{number}." for number in range(model.shapes.layers)}
    return {name for name in places if name.startswith(tuple(blocks - behind))}


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
