"""Models by name. The presets and their sources are in data/models.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_hexi.cost.model import Model
from megatron_hexi.options.layer_features import layer_pattern
from megatron_hexi.yaml_file import read_yaml

DATA = Path(__file__).parent / "data" / "models.yaml"


@functools.cache
def presets() -> Mapping[str, Model]:
    """All presets by name, in the order of the data."""
    return MappingProxyType(
        {name: Model(name=name, **_with_layers(entry, name)) for name, entry in read_yaml(DATA).data.items()}
    )


def _with_layers(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The model's fields of an entry, with patterns of layers ("[0]*3+[1]*58") as a value for each layer."""
    fields = {field: value for field, value in entry.items() if field not in ("constants", "no_flags")}
    for kind in ("experts", "window", "state"):
        if "layers" in fields.get(kind, {}):
            pattern = layer_pattern(f"{kind}.layers", fields[kind]["layers"], fields["layers"], name)
            fields[kind] = fields[kind] | {"layers": tuple(pattern)}
    return fields


@functools.cache
def preset_constants() -> Mapping[str, tuple[str, ...]]:
    """Megatron's flags for what shapes leave open, of all presets by name; flags without a value are null.

    A preset that Megatron cannot train has none.
    """
    return {
        name: tuple(str(word) for pair in entry["constants"].items() for word in pair if word is not None)
        for name, entry in read_yaml(DATA).data.items()
        if "constants" in entry
    }


@functools.cache
def preset_problems() -> Mapping[str, str]:
    """Parts of a model that Megatron has no flags for, by name of the presets that have them."""
    return {name: entry["no_flags"] for name, entry in read_yaml(DATA).data.items() if "no_flags" in entry}
