"""Preset models by name; their shapes and sources are in data/models.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_hexi.kinds.layer_list import layer_pattern
from megatron_hexi.models.model import Model
from megatron_hexi.yaml_file import read_yaml

DATA = Path(__file__).parent / "data" / "models.yaml"


@functools.cache
def presets() -> Mapping[str, Model]:
    """Return all preset models by name, in the order of the data."""
    return MappingProxyType(
        {name: Model(name=name, **_with_layers(entry, name)) for name, entry in read_yaml(DATA).data.items()}
    )


def _with_layers(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of `Model` of an entry of the data.

    Patterns of layers ("[0]*3+[1]*58") become one value for each layer.
    """
    fields = {field: value for field, value in entry.items() if field not in ("constants", "no_flags")}
    for kind in ("experts", "window", "state"):
        if "layers" in fields.get(kind, {}):
            pattern = layer_pattern(f"{kind}.layers", fields[kind]["layers"], fields["layers"], name)
            fields[kind] = fields[kind] | {"layers": tuple(pattern)}
    return fields


@functools.cache
def preset_constants() -> Mapping[str, tuple[str, ...]]:
    """Return the words of Megatron's flags for constants that do not follow from shapes, by preset.

    A preset that Megatron cannot train has no entry.
    """
    return {
        name: tuple(str(word) for pair in entry["constants"].items() for word in pair if word is not None)
        for name, entry in read_yaml(DATA).data.items()
        if "constants" in entry
    }


@functools.cache
def preset_problems() -> Mapping[str, str]:
    """Return the features for which Megatron has no flags, in words, by name of the preset."""
    return {name: entry["no_flags"] for name, entry in read_yaml(DATA).data.items() if "no_flags" in entry}
