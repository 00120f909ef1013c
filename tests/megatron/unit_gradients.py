"""Our entry point for one iteration with random weights, after which each rank's gradients are in a file.

What ranks have before any sum shows how they hold a weight; what they have afterwards, whether it was summed
so. `weights_of` compares both with one rank.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron import unit_weights
from megatron_hexi.megatron.stages.boxes import held_boxes
from megatron_hexi.megatron.unit_weights import Holding
from megatron_hexi.mesh import Cell
from megatron_hexi.runtime.bucket_buffer import HeldBox, main_grad

#: Part of a weight, by the weight's name in checkpoints.
type Key = tuple[str, Cell]

#: Of a gradient's largest element: what rounding may do, and what a wrong sum does at least.
ROUNDING, PLAIN = 1e-4, 2e-2


@dataclass(frozen=True)
class Weight:
    """The gradients of one weight on the ranks of a unit.

    Attributes:
        shown: ``split``, ``part``, ``whole``, or how far it is from each of these.
        said: what the table says.
        error: of the gradient after all sums, as a part of its largest element.
    """

    shown: str
    said: str
    error: float


def weights_of(one: Path, unit: Path, ranks: int = 2) -> dict[str, Weight]:
    """Compare what `main` left in the folder of one rank, and in that of a unit; by the weight's name."""
    alone, *parts = [_load(one, 0), *(_load(unit, rank) for rank in range(ranks))]
    before, after = (_whole(alone, when) for when in ("before", "after"))
    errors: dict[str, float] = {}
    for part in parts:
        for (key, cell), gradient in part["after"].items():
            errors[key] = max(errors.get(key, 0.0), _off(gradient, after[key][_slices(cell)], after[key]))
    shown: dict[str, tuple[set[str], str, str]] = {}
    for part in parts:
        for (key, cell), gradient in part["before"].items():
            true = before[key][_slices(cell)]
            holders = [other["before"].get((key, cell)) for other in parts]
            found, _, _ = shown.setdefault(part["names"][key, cell], (set(), part["said"][key, cell], key))
            found.add(_shown(true, gradient, [one for one in holders if one is not None], ranks))
    return {
        name: Weight(" or ".join(sorted(found)), said, errors[key])
        for name, (found, said, key) in shown.items()
    }


def rows_asked(unit: Path) -> set[tuple[str, str]]:
    """Rows of the table that a unit's weights were found in: class of a layer, and name."""
    rows: set[tuple[str, str]] = _load(unit, 0)["rows"]
    return rows


def _load(folder: Path, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"gradients-{rank}.pt", weights_only=False)
    return loaded


def _whole(alone: dict[str, Any], when: str) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for (key, cell), gradient in alone[when].items():
        whole.setdefault(key, torch.full(alone["shapes"][key], torch.nan))[_slices(cell)] = gradient
    return whole


def _shown(true: Tensor, own: Tensor, holders: list[Tensor], ranks: int) -> str:
    if len(holders) < ranks:
        off = {"split": _off(own, true, true)}
    else:
        whole = max(_off(gradient, true, true) for gradient in holders)
        off = {"whole": whole, "part": _off(sum(holders, torch.zeros_like(true)), true, true)}
    near = [share for share, error in off.items() if error < ROUNDING]
    others = [error for share, error in off.items() if share not in near]
    return near[0] if len(near) == 1 and all(error > PLAIN for error in others) else f"{off}"


def _off(found: Tensor, true: Tensor, scale: Tensor) -> float:
    return float((found - true).abs().max() / scale.abs().max())


def _slices(cell: Cell) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in cell)


def main() -> None:
    """Train one iteration."""
    from megatron.training import training

    from megatron_hexi import pretrain_gpt
    from tests.megatron import planted

    original = training.finalize_model_grads
    rows: set[tuple[str, str]] = set()

    class Asked(dict[tuple[str, str], Holding]):
        def __getitem__(self, row: tuple[str, str]) -> Holding:
            rows.add(row)
            return super().__getitem__(row)

    unit_weights.HOLDINGS = Asked(unit_weights.HOLDINGS)

    def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
        held = [box for chunk in model for box in chunk.module.held_boxes]
        names = {weight: name for chunk in model for name, weight in chunk.module.named_parameters()}
        table = {w: h for chunk in model for w, h in unit_weights.holdings(chunk.module).items()}
        keys = {(box.box.key, box.box.cell): box for box in held}

        def gradients() -> dict[Key, Tensor]:
            return {key: _of(box, main_grad(box.parameter)).clone() for key, box in keys.items()}

        before = gradients()
        original(model, *args, **kwargs)
        found = {
            "before": before,
            "after": dict(_owned(model[0].pieces)) if hasattr(model[0], "pieces") else gradients(),
            "shapes": {key: box.box.shape for (key, _), box in keys.items()},
            "names": {key: names[box.parameter] for key, box in keys.items()},
            "said": {key: _said(table[box.parameter], model[0].config) for key, box in keys.items()},
            "rows": rows,
        }
        torch.save(found, f"gradients-{os.environ['RANK']}.pt")

    training.finalize_model_grads = finalize_model_grads
    for module, model in (("gpt.gpt_model", "GPTModel"), ("hybrid.hybrid_model", "HybridModel")):
        _with_random_weights(getattr(importlib.import_module(f"megatron.core.models.{module}"), model))
    (planted if "--planted" in sys.argv else pretrain_gpt).main()


def _said(holding: Holding, config: Any) -> str:
    if holding is Holding.SPLIT:
        return "split"
    return "part" if holding.is_part(config.sequence_parallel) else "whole"


def _with_random_weights(model: Any) -> None:
    """Let a model begin with weights that depend on their names alone, large enough to show wrong sums."""
    original = model.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Megatron's own wrapper gives all parameters one storage, by which boxes are not found any more.
        self.held_boxes = held_boxes(self)
        with torch.no_grad():
            for held in self.held_boxes:
                key, generator = (
                    held.box.key,
                    torch.Generator().manual_seed(zlib.crc32(held.box.key.encode())),
                )
                whole = 0.2 * torch.randn(held.box.shape, generator=generator)
                is_scale = "norm" in key and not key.endswith("bias")
                _of(held, held.parameter).copy_(whole[_slices(held.box.cell)] + is_scale)

    model.__init__ = __init__


def _of(held: HeldBox, tensor: Tensor) -> Tensor:
    return held.view(tensor, held.box.cell)


def _owned(pieces: Any) -> Iterator[tuple[Key, Tensor]]:
    for buffer, slab in pieces.owned():
        span = slice(slab.start - buffer.own_run.start, slab.stop - buffer.own_run.start)
        shape = [stop - start for start, stop in slab.cell]
        yield (slab.key, slab.cell), buffer.own_gradients[span].view(shape).clone()
