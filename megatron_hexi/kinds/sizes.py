"""Checks of the sizes of a kind of layer, and of the list of layers that have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_schema import short

#: Far above any model, and small enough that weights can be counted.
LARGEST = 2**32


def check_sizes(name: str, kind: Any, least: Mapping[str, int] | None = None) -> None:
    """Check that all sizes of a kind are whole numbers, from 1 or from the number in `least` on.

    Raises:
        HexiError: a size is no such number; the message has the size's name and the remedy.
    """
    for size in (field.name for field in fields(kind) if field.type in ("int", "int | None")):
        value, smallest = getattr(kind, size), (least or {}).get(size, 1)
        if value is None and size == "query_rank":
            continue
        if type(value) is not int or not smallest <= value <= LARGEST:
            raise HexiError(
                f"{name}: {size} = {short(value)}; write a whole number from {smallest} to {LARGEST}"
            )


def freeze_layers(name: str, kind: Any) -> None:
    """Make the list of layers that have a kind a tuple, empty where all have it.

    Raises:
        HexiError: an entry is not true or false, or no layer has the kind.
    """
    layers = tuple(kind.layers)
    if any(type(has) is not bool for has in layers):
        raise HexiError(f"{name}: layers = {short(list(layers))}; write true or false for each layer")
    if layers and not any(layers):
        raise HexiError(f"{name} is given, but no entry of its layers is true; leave {name} out")
    object.__setattr__(kind, "layers", () if all(layers) else layers)


def built[T](kind: type[T], value: T | Mapping[str, Any] | None) -> T | None:
    """Return `value` as an object of class `kind`: itself, or built from fields, as in the presets' file."""
    return kind(**value) if isinstance(value, Mapping) else value
