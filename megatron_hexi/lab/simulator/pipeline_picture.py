"""A simulated pipeline as a picture: the micro-batches of each stage over time, and idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch

from megatron_hexi.cost.pipeline import PassSpan
from megatron_hexi.grouping import grouped
from megatron_hexi.lab.simulator import Simulation
from megatron_hexi.plan import Plan
from megatron_hexi.report.labels import BarLabel, every_nth, wrap
from megatron_hexi.spelling import time_unit

_TAIL = "gradients and optimizer"
_COLOURS = {"forward": "#4878a8", "backward": "#e08214", "encoder": "#6a51a3", _TAIL: "#8c8c8c"}
_BAR = 0.8  # height of a bar, where rows are one apart
_ROW, _AROUND = 0.34, 1.5  # of a row, and of title, axis and legend, in inches
_MAX_HEIGHT = 24.0  # inches; beyond it rows get thinner instead
_LINE, _LETTERS = 0.16, 44  # of a label: its height in inches, its length
#: Micro-batches narrower than these parts of the iteration get no number, and no white edge.
_LEAST_NUMBERED, _LEAST_EDGED = 0.006, 0.0015
#: Digits to which times of replicas that share rows are equal, as parts of the iteration.
_DIGITS = 4


@dataclass(frozen=True)
class PipelineRow:
    """A stage of replicas that run alike, or a domain of it that takes whole micro-batches.

    Args:
        lane: see `PassSpan`.
    """

    replicas: tuple[int, ...]
    stage: int
    lane: int
    spans: tuple[PassSpan, ...]


def pipeline_rows(simulation: Simulation) -> list[PipelineRow]:
    """Return the rows of the picture, by replica, stage and lane; replicas that run alike share rows."""
    alike: dict[object, list[int]] = {}
    for replica, spans in enumerate(simulation.pipeline):
        look = tuple(
            (
                span.stage,
                span.lane,
                span.way,
                *(round(time / simulation.iteration_s, _DIGITS) for time in (span.start_s, span.end_s)),
            )
            for span in spans
        )
        alike.setdefault(look, []).append(replica)
    rows = []
    for replicas in alike.values():
        spans_of = grouped(((span.stage, span.lane), span) for span in simulation.pipeline[replicas[0]])
        rows += [
            PipelineRow(tuple(replicas), *place, tuple(sorted(spans, key=lambda span: span.start_s)))
            for place, spans in sorted(spans_of.items())
        ]
    return rows


def pipeline_height(rows: Sequence[PipelineRow]) -> float:
    """Return the height of the picture of these rows, in inches."""
    return min(_AROUND + _ROW * len(rows), _MAX_HEIGHT)


def draw_pipeline(
    figure: SubFigure, rows: Sequence[PipelineRow], simulation: Simulation, plan: Plan | None
) -> None:
    """Draw an iteration, a row for each stage: forward and backward passes, the encoder; idle time is blank.

    Args:
        figure: figure to draw in, with the height `pipeline_height`.
        plan: plan for the layers of the stages; ``None``: labels have none.
    """
    axes = figure.subplots()
    unit = time_unit(simulation.iteration_s)
    end = simulation.iteration_s / unit.seconds
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{unit.word} of an iteration")
    axes.set_title("Pipeline: micro-batches by stage; idle time is blank.", fontsize=10, loc="left")
    shown: dict[str, None] = {}
    devices = _devices(simulation, plan)
    step = every_nth(len(rows), pipeline_height(rows) - _AROUND, _LINE)
    for place, row in enumerate(rows):
        bars = _bars(row, simulation)
        shown |= dict.fromkeys(bars)
        _draw_row(axes, place, bars, unit.seconds)
        if place % step == 0:
            busy = sum(stop - start for spans in bars.values() for start, stop, _ in spans)
            idle = max(0.0, 1 - busy / simulation.iteration_s)
            axes.text(1.005 * end, place, f"{idle:.0%} idle", fontsize=8, va="center")
    names = [_name(row, rows, plan, devices) for row in rows]
    axes.set_yticks(range(0, len(rows), step), names[::step], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)


#: Begin and end in seconds, and the micro-batch, by kind.
_Bars = dict[str, list[tuple[float, float, int | None]]]


def _bars(row: PipelineRow, simulation: Simulation) -> _Bars:
    """Return the bars of a stage by kind; the last ends with the iteration."""
    bars: _Bars = grouped((span.way, (span.start_s, span.end_s, span.micro_batch)) for span in row.spans)
    last = max(span.end_s for span in row.spans)
    start = max(last, simulation.iteration_s - simulation.once[row.replicas[0], row.stage].total)
    if start < simulation.iteration_s:
        bars[_TAIL] = [(start, simulation.iteration_s, None)]
    return bars


def _draw_row(axes: Axes, place: int, bars: _Bars, unit_s: float) -> None:
    whole = axes.get_xlim()[1]
    for kind, spans in bars.items():
        ranges = [(start / unit_s, (stop - start) / unit_s) for start, stop, _ in spans]
        wide = [width > _LEAST_EDGED * whole for _, width in ranges]
        axes.broken_barh(
            ranges,
            (place - _BAR / 2, _BAR),
            facecolor=_COLOURS[kind],
            edgecolor="white",
            linewidth=[0.4 * is_wide for is_wide in wide],
        )
        for (start, width), (_, _, micro_batch) in zip(ranges, spans, strict=True):
            if micro_batch is not None and width > _LEAST_NUMBERED * whole:
                corners = start, start + width, place + _BAR / 2, place - _BAR / 2
                BarLabel(axes, corners, [str(micro_batch)], fontsize=6, color="white")


def replicas_of_units(plan: Plan | None) -> dict[int, int]:
    """Return the replica of each member of the plan, by the member's number; empty without a plan."""
    if plan is None:
        return {}
    of_lead = {
        member.lead: number
        for number, replica in enumerate(plan.replicas)
        for stage in replica.stages
        for member in stage.members
    }
    return {number: of_lead[member.lead] for number, member in enumerate(plan.members)}


def _devices(simulation: Simulation, plan: Plan | None) -> dict[tuple[int, int], str]:
    """Return the GPUs of each replica's stages; without a plan all belong to replica 0."""
    replica_of = replicas_of_units(plan)
    devices: dict[tuple[int, int], dict[str, None]] = {}
    for rank in simulation.ranks:
        devices.setdefault((replica_of.get(rank.unit, 0), rank.stage), {})[rank.device] = None
    return {place: " + ".join(names) for place, names in devices.items()}


def _name(
    row: PipelineRow, rows: Sequence[PipelineRow], plan: Plan | None, devices: Mapping[tuple[int, int], str]
) -> str:
    """Return the name of a row: replica, stage, layers and GPUs; of a lane also its first micro-batch."""
    words = []
    if any(r.replicas != row.replicas for r in rows):
        first, last = row.replicas[0], row.replicas[-1]
        consecutive = row.replicas == tuple(range(first, last + 1))
        numbers = f"{first}-{last}" if consecutive and first < last else ", ".join(map(str, row.replicas))
        words.append(f"replica {numbers}")
    words.append(f"stage {row.stage}")
    stages = plan.replicas[row.replicas[0]].stages if plan is not None else ()
    layers = stages[row.stage].layers if row.stage < len(stages) else None
    if layers is not None:
        words.append(f"{layers[1] - layers[0]} layers")
    if any(r.lane for r in rows if r.stage == row.stage and r.replicas == row.replicas):
        words.append(f"micro-batches {row.spans[0].micro_batch}, …")
    gpus = devices.get((row.replicas[0], row.stage))
    return wrap(", ".join(words) + (f": {gpus}" if gpus else ""), _LETTERS, 1)
