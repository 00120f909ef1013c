"""The drawing of one pass of attention on one rank: the operations of `plan.program`, on a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.plan.program import (
    Batch,
    FarBlocks,
    Operation,
    OwnBlock,
    Post,
    Wait,
    attention_program,
)
from scripts.docs.drawing import GROUP_COLOURS

#: Parts in which the keys of each step come: three groups, so two steps; those of the first in two messages.
_PARTS = (2, 1)
MEMBERS, GROUPS, COMPUTE = "all-to-all in the group", "exchange between groups", "computation"
_LANES = (MEMBERS, GROUPS, COMPUTE)
_COLOURS = dict(zip(_LANES, ("#a6cee3", "#b2df8a", GROUP_COLOURS[1]), strict=True))
#: Time of a message; of a block in the forward pass. The backward pass computes 2.5 times as much.
_MESSAGE: Mapping[str, float] = {"in": 0.6, "out": 0.6, "keys": 1.6, "gradients": 1.6}
_OWN, _FAR, _BACKWARD = 2.0, 2.0, 2.5


class Span(NamedTuple):
    """A message or a computation that occupies a lane for a time."""

    lane: str
    name: str
    begin: float
    end: float


def draw_pass() -> Figure:
    """A panel for each direction; blocks below the messages that they hide."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = [passes(backward) for backward in (False, True)]
    for axes, title, spans in zip(figure.subplots(2, 1), ("forward", "backward"), panels, strict=True):
        _draw(axes, title, spans)
    figure.axes[-1].set_xlabel("time")
    return figure


def passes(backward: bool) -> list[Span]:
    """Return the messages and computations of one rank in a forward or backward pass."""
    return _run(attention_program(backward, _PARTS, window=1, halves=2, turn=0), backward)


def _run(program: Sequence[Operation], backward: bool) -> list[Span]:
    """When each operation takes place: in order, a message behind those that its lane already carries."""
    now, free, arrives = 0.0, dict.fromkeys(_LANES, 0.0), dict[Batch, float]()
    spans = []
    for operation in program:
        match operation:
            case Post(batch):
                lane = MEMBERS if batch.cargo in ("in", "out") else GROUPS
                begin = max(now, free[lane])
                free[lane] = arrives[batch] = begin + _MESSAGE[batch.cargo] / _pieces(batch)
                spans.append(Span(lane, _name(batch), begin, arrives[batch]))
            case Wait(batch):
                now = max(now, arrives[batch])
            case OwnBlock() | FarBlocks():
                end = now + _seconds(operation) * (_BACKWARD if backward else 1)
                spans.append(Span(COMPUTE, _block_name(operation), now, end))
                now = end
    return spans


def _pieces(batch: Batch) -> int:
    return _PARTS[batch.step] if batch.cargo in ("keys", "gradients") else 1


def _name(batch: Batch) -> str:
    if batch.cargo in ("in", "out"):
        return f"{batch.cargo} {batch.step + 1}"
    step = str(batch.step + 1) + (f".{batch.part + 1}" if _pieces(batch) > 1 else "")
    return f"{'keys' if batch.cargo == 'keys' else 'grads'} {step}"


def _seconds(block: OwnBlock | FarBlocks) -> float:
    if isinstance(block, OwnBlock):
        return _OWN * (block.stop - block.first) / 2
    return _FAR / _PARTS[block.step] / (1 if block.piece is None else 2)


def _block_name(block: OwnBlock | FarBlocks) -> str:
    if isinstance(block, OwnBlock):
        return "own keys" if block.stop - block.first == 2 else f"own keys, half {block.first + 1}"
    part = f".{block.part + 1}" if _PARTS[block.step] > 1 else ""
    half = "" if block.piece is None else f", half {block.piece + 1}"
    return f"keys {block.step + 1}{part}{half}"


def _draw(axes: Axes, title: str, spans: Sequence[Span]) -> None:
    for span in spans:
        row, length = _LANES.index(span.lane), span.end - span.begin
        axes.barh(row, length, 0.8, span.begin, color=_COLOURS[span.lane], edgecolor="white", linewidth=0.8)
        axes.text((span.begin + span.end) / 2, row, span.name, ha="center", va="center", fontsize=6.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, max(span.end for span in spans))
    axes.set_xticks([])
    axes.set_yticks(range(len(_LANES)), _LANES, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
