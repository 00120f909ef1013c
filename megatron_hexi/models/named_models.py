"""Models by name: presets of data/models.yaml, and others that scripts name, of data/hub.yaml."""

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
_HUB = DATA.with_name("hub.yaml")


@functools.cache
def presets() -> Mapping[str, Model]:
    """Return all preset models by name, in the order of the data."""
    return MappingProxyType(
        {name: Model(name=name, **_with_layers(entry, name)) for name, entry in read_yaml(DATA).data.items()}
    )


@functools.cache
def _hub() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of models that scripts name, whole: with what they are like."""
    found = dict(read_yaml(DATA).data)
    for name, entry in read_yaml(_HUB).data.items():
        like = found.get(entry.get("like"), {})
        constants = {"constants": like.get("constants", {}) | entry.get("constants", {})}
        found[name] = {key: value for key, value in (like | entry | constants).items() if key != "like"}
    return found


def hub_model(name: str) -> tuple[Model, tuple[str, ...]] | None:
    """Return the model of a name on Hugging Face, and the words of its constants; ``None``: not known."""
    low = name.rstrip("/").rpartition("/")[2].lower()
    entry = _hub().get(low)
    if entry is None or "no_flags" in entry:
        return None
    return Model(name=name, **_with_layers(entry, low)), _constants(entry)


def _constants(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of an entry's constants."""
    return tuple(str(word) for pair in entry["constants"].items() for word in pair if word is not None)


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
    return {name: _constants(entry) for name, entry in read_yaml(DATA).data.items() if "constants" in entry}


@functools.cache
def preset_problems() -> Mapping[str, str]:
    """Return the features for which Megatron has no flags, in words, by name of the preset."""
    return {name: entry["no_flags"] for name, entry in read_yaml(DATA).data.items() if "no_flags" in entry}
