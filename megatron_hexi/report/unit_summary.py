"""Rows of a plan's units, from which tables, pictures and JSON are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hexi.plan import Plan, Traffic, attention_traffic, build_schedule
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.plan.terms import Offload, Order
from megatron_hexi.plan.units import Unit, unit_rows

#: Traffic is counted for one sequence in bf16.
BATCH = 1
ELEMENT_BYTES = 2
#: Fields that rows have of `Unit`.
_OF_UNITS = (
    *("ranks", "replica", "stage", "layers", "ministages", "recompute", "group", "tokens", "heads"),
    *("state", "precision", "patches"),
)


@dataclass(frozen=True)
class UnitSummary:
    """A unit, and the traffic of one of its ranks in one attention layer for one sequence in bf16.

    Args:
        layers: the layers of the stage; ``None``: all, and the job's pipeline repeats it.
        samples: samples of each micro-batch that the domain takes; ``None``: all.
        micro_batches: whole micro-batches of an iteration that the domain takes; ``None``: all.
        share: part of the sequence in its shard, from 0 to 1.
        kv_heads: the KV heads that its query heads read.
        state: its share of the optimizer's state, relative to other units.
        experts: ranges of experts of its ranks, or one range that they divide; ``None``: all, divided.
        precision: ``bf16`` if it computes so in a job in fp8; ``None``: as the job says.
        patches: its weight in the division of images; ``None``: it has none.
        ministages: the layers of each of its ministages; ``None``: it runs whole.
        order: order of the ministages; ``None``: one after the other.
        recompute: recomputation of the stage; ``None``: the job's setting.
    """

    rank: int
    ranks: tuple[int, ...]
    replica: int
    stage: int
    layers: Range | None
    ministages: tuple[Range, ...] | None
    order: Order | None
    offload: tuple[Offload, ...] | None
    recompute: Recompute | None
    domain: int
    samples: int | None
    micro_batches: int | None
    group: int
    group_name: str
    tokens: int
    share: float
    heads: Range
    kv_heads: Range
    segments: tuple[Range, ...]
    state: int
    experts: tuple[Range, ...] | None
    precision: Literal["bf16"] | None
    patches: int | None
    forward: Traffic
    backward: Traffic

    @property
    def layer_ranges(self) -> tuple[Range, ...]:
        """The layers of its stage, by ministage; an empty range where the job's pipeline repeats it."""
        return self.ministages or (self.layers or (0, 0),)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Numbers of replica, stage, domain and group, the same for all members of a group."""
        return (self.replica, self.stage, self.domain, self.group)


def spell_ministages(count: int, order: Order | None) -> str:
    """Return a stage's number of ministages and their order as text: ``2 interleaved ministages``."""
    return " ".join(filter(None, (str(count), order, "ministages")))


def unit_summaries(plan: Plan) -> list[UnitSummary]:
    """Return a row for each unit of a plan that passed its checks, ascending."""
    return [_summary(plan, number, unit) for number, unit in enumerate(unit_rows(plan))]


def _summary(plan: Plan, number: int, unit: Unit) -> UnitSummary:
    workload = plan.workload_of(unit.domain)
    schedule = build_schedule(workload, unit.domain, unit.member, unit.exchange.parts)
    sizes = workload.value_dim, sum(workload.exchanged_sizes)
    forward, backward = attention_traffic(schedule, workload.head_dim, BATCH, ELEMENT_BYTES, *sizes)
    return UnitSummary(
        **{name: getattr(unit, name) for name in _OF_UNITS},
        rank=number,
        order=plan.replicas[unit.replica].order,
        offload=unit.offload or None,
        domain=unit.number,
        samples=unit.domain.samples,
        micro_batches=unit.domain.micro_batches,
        group_name=unit.domain.groups[unit.group].name,
        share=unit.tokens / workload.seq_length,
        kv_heads=schedule.own_kv,
        segments=schedule.segments,
        experts=unit.domain.members[unit.member].experts,
        forward=forward,
        backward=backward,
    )
