"""Recipes: named jobs that train a preset at a longer context, as files of Megatron's arguments.

The values and their sources are in data/recipes.yaml.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_hexi.argument_file import replace_flags
from megatron_hexi.models.megatron_arguments import model_flags
from megatron_hexi.models.named_models import preset_constants, presets
from megatron_hexi.yaml_file import read_yaml

_DATA = Path(__file__).parent / "data" / "recipes.yaml"


@dataclass(frozen=True)
class Recipe:
    """A named training job: a preset, its sequence length and batch, and Megatron's flags with sources.

    Args:
        name: name of the recipe.
        model: name of the preset.
        seq_length: tokens of a sequence.
        global_batch_size: sequences of an iteration.
        lr: the highest learning rate.
        iterations: number of iterations of the training.
        tokenizer: name of the tokenizer on Hugging Face.
        flags: values of all flags of the job, by flag; ``None``: the flag takes no value.
        sources: sources of the values, one line each.
    """

    name: str
    model: str
    seq_length: int
    global_batch_size: int
    lr: float
    iterations: int
    tokenizer: str
    flags: Mapping[str, Any]
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """The recipe as a file of Megatron's arguments, its sources as comments."""
        head = [
            f"{self.name}: lengthens the context of {self.model} to {self.seq_length} tokens",
            *self.sources,
        ]
        lines = [f"# {line}" for line in head]
        lines += [flag if value is None else f"{flag} {value}" for flag, value in self.flags.items()]
        return "\n".join([*lines, ""])


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """Return all recipes by name: models in the order of the data, each at all of its lengths."""
    data = read_yaml(_DATA).data
    found = [
        _recipe(model, entry, length, job, data["common"])
        for model, entry in data["models"].items()
        for length, job in data["lengths"].items()
        if length in entry["rotary"]
    ]
    return MappingProxyType({recipe.name: recipe for recipe in found})


def _recipe(
    model: str, entry: Mapping[str, Any], length: str, job: Mapping[str, Any], common: Mapping[str, Any]
) -> Recipe:
    rotary, lr = entry["rotary"][length], job["lr"] * entry["lr_share"]
    flags = {
        **_pairs(replace_flags(model_flags(presets()[model], job["seq_length"]), preset_constants()[model])),
        **entry.get("flags", {}),
        **rotary["flags"],
        "--seq-length": job["seq_length"],
        "--global-batch-size": job["batch"],
        "--train-iters": job["iterations"],
        "--lr": f"{lr:g}",
        "--min-lr": f"{lr / 10:g}",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": entry["tokenizer"],
        **common["flags"],
    }
    sources = (
        f"model: {presets()[model].source}",
        job["source"],
        *([entry["lr_source"]] if "lr_source" in entry else []),
        rotary["source"],
        common["source"],
    )
    return Recipe(
        f"{model}-{length}",
        model,
        job["seq_length"],
        job["batch"],
        lr,
        job["iterations"],
        entry["tokenizer"],
        flags,
        sources,
    )


def _pairs(words: Iterable[str]) -> dict[str, str | None]:
    """Return the values of flags by flag; ``None``: the flag takes no value."""
    found: dict[str, str | None] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = None
        else:
            found[flag] = word
    return found
