"""Models by name. The presets and their sources are in data/models.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_hexi.cost.model import Model
from megatron_hexi.yaml_file import read_yaml

DATA = Path(__file__).parent / "data" / "models.yaml"


@functools.cache
def presets() -> Mapping[str, Model]:
    """All presets by name, in the order of the data."""
    return MappingProxyType(
        {
            name: Model(name=name, **{field: value for field, value in entry.items() if field != "constants"})
            for name, entry in read_yaml(DATA).data.items()
        }
    )


@functools.cache
def preset_constants() -> Mapping[str, tuple[str, ...]]:
    """Megatron's flags for what shapes leave open, of all presets by name."""
    return {
        name: tuple(str(word) for pair in entry["constants"].items() for word in pair)
        for name, entry in read_yaml(DATA).data.items()
    }
