"""The drawing of the packages: who imports whom, from the contracts that lint-imports holds."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.docs.drawing import FAINT, add_box

_ROOT = Path(__file__).parents[2]
_PLANNING, _TRAINING = "#fdbf6f", "#a6cee3"


def draw_packages() -> Figure:
    """Planning on the left, training on the right, what both use across; each layer imports those below."""
    planning, training = (_layers(name) for name in ("Planner half", "Runtime half"))
    common = {name for layer in planning for name in layer} & {name for layer in training for name in layer}
    above, below = _common_layers(planning, common)
    columns = [_without(layers, common) for layers in (planning, training)]
    rows = max(map(len, columns))
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    _stack(axes, above, (0.0, 2.1), (rows, rows + len(above)), FAINT)
    for side, (layers, colour) in enumerate(zip(columns, (_PLANNING, _TRAINING), strict=True)):
        _stack(axes, layers, (side * 1.1, side * 1.1 + 1.0), (0, rows), colour)
    _stack(axes, below, (0.0, 2.1), (-len(below), 0), FAINT)
    top = rows + len(above)
    axes.text(0.5, top + 0.2, "planning, without torch", ha="center", fontsize=10)
    axes.text(1.6, top + 0.2, "training, without OR-Tools", ha="center", fontsize=10)
    axes.set_xlim(-0.02, 2.12)
    axes.set_ylim(-len(below) - 0.1, top + 0.8)
    axes.set_axis_off()
    return figure


def _layers(contract: str) -> list[list[str]]:
    """Return the packages of each layer of a contract, the highest first; modules are left out."""
    with (_ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = (one for one in contracts if one["name"].startswith(contract))
    layers = [[name.strip() for name in layer.split("|")] for layer in found["layers"]]
    return _where(layers, lambda name: (_ROOT / "megatron_hexi" / name.replace(".", "/")).is_dir())


def _common_layers(layers: list[list[str]], common: set[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the layers that both halves have: those above the first layer of one half alone, and below."""
    found = _where(layers, lambda name: name in common)
    highest = next(number for number, layer in enumerate(layers) if "planner" in layer)
    split = sum(1 for layer in layers[:highest] if any(name in common for name in layer))
    return found[:split], found[split:]


def _without(layers: list[list[str]], common: set[str]) -> list[list[str]]:
    return _where(layers, lambda name: name not in common)


def _where(layers: Sequence[Sequence[str]], keep: Callable[[str], bool]) -> list[list[str]]:
    kept = ([name for name in layer if keep(name)] for layer in layers)
    return [layer for layer in kept if layer]


def _stack(
    axes: Axes, layers: list[list[str]], across: tuple[float, float], up: tuple[float, float], colour: str
) -> None:
    """Draw layers from the top down, in equal heights between two levels."""
    height = (up[1] - up[0]) / len(layers)
    for number, layer in enumerate(layers):
        corner = across[0], up[1] - (number + 1) * height + 0.05
        add_box(axes, corner, (across[1] - across[0], height - 0.1), ",  ".join(layer), colour)
