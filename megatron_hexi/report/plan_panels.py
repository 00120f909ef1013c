"""The panels of a plan's picture: rows of coloured bars for layers, tokens, heads and experts.

One colour a rank; where the GPUs are known, one hue a kind of GPU, in shades that tell neighbours apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib import colormaps

from megatron_hexi.plan import Plan
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.units import expert_domains
from megatron_hexi.report.labels import lines_of, wrap
from megatron_hexi.report.unit_summary import UnitSummary, spell_ministages
from megatron_hexi.spelling import spell_range

#: Red, green, blue, opacity; each from 0 to 1.
Colour = tuple[float, float, float, float]

#: Unit of the axis of tokens.
POSITION = "position in the sequence"
_ROW_HEIGHT = 0.5  # of a row, in inches
LINE = 0.17  # of a line of a row's label, in inches
#: `tab20c` has four shades of each of five hues; the lightest is too near to white.
_SHADES, _HUES = 4, 5
#: Suffixes of `hexi plan` on a node's name: number, GPU, further nodes.
_NODE_NUMBER = re.compile(r"(-\d+)?(/\d+)?( and \d+ more nodes)?$")


class Bar(NamedTuple):
    """Ranges of one colour in a row of a `PlanPanel`, and texts of which the first that fits labels each."""

    row: tuple[int, ...]
    ranges: Sequence[Range]
    colour: Colour
    texts: Sequence[str]


@dataclass(frozen=True)
class PlanPanel:
    """A panel with rows of bars."""

    title: str
    unit: str
    end: int
    rows: Mapping[tuple[int, ...], str]
    bars: Sequence[Bar]

    @property
    def height(self) -> float:
        """Height of the rows and their labels, in inches."""
        return (len(self.rows) + 0.5) * max(_ROW_HEIGHT, LINE * lines_of([*self.rows.values()]))


def plan_panels(plan: Plan, rows: Sequence[UnitSummary], paint: Paint) -> list[PlanPanel]:
    """Return the panels of a plan; a domain or a group of one unit has no row where others do."""
    panels = []
    if rows[0].layers is not None:
        stages = {row.place[:2]: row for row in reversed(rows)}  # the first unit of each stands for it
        bars = [
            Bar(row.place[:1], row.layer_ranges, paint.of_stage(row), _stage_texts(row))
            for row in stages.values()
        ]
        replicas: dict[tuple[int, ...], str] = {row.place[:1]: wrap(_replica_name(plan, row)) for row in rows}
        layers = max(stop for row in rows for _, stop in row.layer_ranges)
        panels.append(PlanPanel("Layers of each pipeline stage.", "layer", layers, replicas, bars))
    domains = _divided(rows, 3, _domain_name, all_if_none=not panels)
    if domains:
        bars = [Bar(row.place[:3], row.segments, paint.units[row.rank], [_ranks(row)]) for row in rows]
        title = "Outside attention: tokens. Numbers are ranks."
        panels.append(PlanPanel(title, POSITION, plan.workload.seq_length, domains, bars))
    groups = _divided(rows, 4, lambda row: _group_name(plan, row), all_if_none=False)
    if groups:
        bars = [Bar(row.place, [_heads(row)], paint.units[row.rank], [_ranks(row)]) for row in rows]
        title = "In attention: query heads of the groups that divide them."
        panels.append(PlanPanel(title, "query head", max(_heads(row)[1] for row in rows), groups, bars))
    if any(row.experts is not None for row in rows):
        panels.append(_expert_panel(plan, rows, paint))
    return panels


def _expert_panel(plan: Plan, rows: Sequence[UnitSummary], paint: Paint) -> PlanPanel:
    """Return a row for each expert domain, with the experts of its ranks; ranks that cut them share a bar."""
    total = plan.workload.experts
    assert total is not None  # units hold some of them
    unit_of = {rank: row for row in rows for rank in row.ranks}
    names: dict[tuple[int, ...], str] = {}
    bars = []
    for replica, stages in enumerate(plan.replicas):
        for number, stage in enumerate(stages.stages):
            domains = expert_domains(stage, total)
            for place, domain in enumerate(domains):
                several = f", expert domain {place}" if len(domains) > 1 else ""
                names[replica, number, place] = wrap(f"replica {replica}, stage {number}{several}")
                for held in (one for one in domain if one.part == 0 and one.count):
                    row = unit_of[held.rank]
                    text = f"{_ranks(row)}: a slice of each" if held.parts > 1 else str(held.rank)
                    bars.append(Bar((replica, number, place), [held.experts], paint.units[row.rank], [text]))
    title = "Experts of each layer: a row is an expert domain, between whose ranks tokens travel."
    return PlanPanel(title, "expert", total, names, bars)


def _divided(
    rows: Sequence[UnitSummary], depth: int, name: Callable[[UnitSummary], str], *, all_if_none: bool
) -> dict[tuple[int, ...], str]:
    """Return the names of domains (depth 3) or groups (depth 4) with several units, by place."""
    units = Counter(row.place[:depth] for row in rows)
    named = {row.place[:depth]: wrap(name(row)) for row in rows}
    several = {place: text for place, text in named.items() if units[place] > 1}
    return several or (named if all_if_none else {})


@dataclass(frozen=True)
class Paint:
    """The colours of a plan."""

    kinds: list[str]
    units: dict[int, Colour]
    kind_of: dict[int, int]

    @classmethod
    def of(cls, rows: Sequence[UnitSummary], gpus: Sequence[str]) -> Paint:
        """Return a colour for each unit; where GPUs are known, shades of one hue for each kind."""
        if not gpus:
            return cls([], {row.rank: colour_of(row.rank, len(rows)) for row in rows}, {})
        kinds = list(dict.fromkeys(_kind(row, gpus) for row in rows))
        kind_of = {row.rank: kinds.index(_kind(row, gpus)) for row in rows}
        counts = [0] * len(kinds)
        units = {}
        for rank, kind in kind_of.items():
            units[rank] = shade(kind, counts[kind])
            counts[kind] += 1
        return cls(kinds, units, kind_of)

    def of_stage(self, row: UnitSummary) -> Colour:
        """Return the colour of a unit's stage."""
        return shade(self.kind_of[row.rank], row.stage) if self.kinds else colour_of(row.stage % 20, 20)


def colour_of(number: int, count: int, few: str = "tab20") -> Colour:
    """Return a colour unlike its neighbours', and unlike all others where the map `few` has as many."""
    return colormaps[few](number) if count <= colormaps[few].N else colormaps["turbo"]((number + 0.5) / count)


def shade(kind: int, number: int) -> Colour:
    """Return the shade of a unit by its number on one kind of GPU; the darkest first."""
    return colormaps["tab20c"](_SHADES * (kind % _HUES) + number % (_SHADES - 1))


def _heads(row: UnitSummary) -> Range:
    """Return a unit's heads over all tensor-parallel ranks, whose number may differ between stages."""
    ranks = 1 if row.layers is None else len(row.ranks)
    return row.heads[0] * ranks, row.heads[1] * ranks


def node_kinds(plan: Plan, rows: Sequence[UnitSummary]) -> list[str]:
    """Return for each rank the names of its group's nodes without numbers; empty where unknown."""
    if plan.provenance is None or not plan.provenance.cluster:
        return []
    kinds = [""] * plan.ranks
    for row in rows:
        stems = [_NODE_NUMBER.sub("", name) for name in row.group_name.split(" + ")]
        for rank in row.ranks:
            kinds[rank] = " + ".join(dict.fromkeys(stems))
    return kinds if all(kinds) else []


def _kind(row: UnitSummary, gpus: Sequence[str]) -> str:
    """Return the GPUs of a unit, and its precision where it has one of its own.

    A pipeline that the job repeats may have several kinds.
    """
    kinds = " + ".join(dict.fromkeys(gpus[rank] for rank in row.ranks))
    return kinds if row.precision is None else f"{kinds}, in {row.precision}"


def _ranks(row: UnitSummary) -> str:
    return spell_range((row.ranks[0], row.ranks[-1] + 1))


def _replica_name(plan: Plan, row: UnitSummary) -> str:
    """Return a replica's name with its micro-batches, ministages and offloading."""
    words = [f"replica {row.replica}"]
    replica = plan.replicas[row.replica]
    if replica.micro_batches is not None:
        words.append(f"{replica.micro_batches} micro-batches")
    if row.ministages is not None:
        words.append(f"{spell_ministages(len(row.ministages), row.order)} a stage")
    if row.offload is not None and all(stage.offload == row.offload for stage in replica.stages):
        words.append(f"offloads {', '.join(row.offload)}")
    return ", ".join(words)


def _stage_texts(row: UnitSummary) -> list[str]:
    """Return labels for the bar of a stage, the longest first."""
    count = sum(stop - start for start, stop in row.layer_ranges)
    name = f"stage {row.stage}"
    words = [f"{name}: {count} layer{'s' if count != 1 else ''}"]
    if row.offload is not None:
        words.insert(0, f"{words[0]}, offloads {', '.join(row.offload)}")
    return [*words, name, str(row.stage)]


def _stage_name(row: UnitSummary) -> str:
    """Return a unit's replica, and its stage where it has layers of its own."""
    return f"replica {row.replica}" + (f", stage {row.stage}" if row.layers is not None else "")


def _domain_name(row: UnitSummary) -> str:
    """Return a domain's replica and stage, with its samples or micro-batches where it takes a part."""
    words = [_stage_name(row)]
    if row.samples is not None:
        words.append(f"{row.samples} samples")
    if row.micro_batches is not None:
        words.append(f"{row.micro_batches} micro-batches")
    return ", ".join(words)


def _group_name(plan: Plan, row: UnitSummary) -> str:
    several = len(plan.replicas) > 1 or row.layers is not None
    name = row.group_name or f"group {row.group}"
    if len(row.ranks) > 1:  # a unit of several GPUs is named after its first
        name = name.partition("/")[0]
    return (f"{_stage_name(row)}: " if several else "") + name
