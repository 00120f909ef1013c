"""A simulated iteration: times of every rank, events and links, and its difference from the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_hexi.cost import IterationCost, Phases
from megatron_hexi.cost.once import Once
from megatron_hexi.cost.pipeline import PassSpan
from megatron_hexi.cost.ranks import RankPlace

Lane = Literal["compute", "network"]
#: Part of an iteration that sums in another order may leave.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class RankTimeline(RankPlace):
    """A rank's part of an iteration; times are seconds and add up to the iteration.

    Args:
        section: number of the units that were replayed together; their spans have a common start.
        busy: work by kind: ``token``, ``attention``, ``experts`` where the model has some, ``encoder`` where
            sequences have images, ``logits``, ``optimizer``; recomputation included.
        communication_s: waiting while its own messages are in flight, all-reduces inside a unit, and exposed
            time of gradients and weights.
        idle_s: waiting for others, and for the pipeline to fill and drain.
    """

    section: int
    busy: Mapping[str, float]
    communication_s: float
    idle_s: float
    idle_share: float

    @property
    def busy_s(self) -> float:
        """Seconds of all its own work."""
        return sum(self.busy.values())


@dataclass(frozen=True, slots=True)
class Span:
    """A replayed activity; times count from the start of the replay of its section of units.

    Args:
        lane: ``compute`` or ``network``; spans on a lane of a rank do not overlap.
        kind: of work ``token`` (in layers, outside attention and routed experts), ``attention``, ``experts``
            or ``logits``; of communication ``all_to_all``, ``exchange`` (of keys and values),
            ``expert_all_to_all`` or ``tensor_parallel``.
        name: name of the activity, such as ``own block``, ``blocks 2`` or ``keys 2``.
        layer: number of the layer among the stage's layers of its kind.
        way: pass of the layer: ``forward``, ``logits``, ``again`` (recomputation) or ``backward``.
        layer_kind: number of the layer's kind among the model's kinds of layers.
    """

    rank: int
    lane: Lane
    kind: str
    name: str
    start_s: float
    end_s: float
    layer: int
    way: str
    layer_kind: int = 0


@dataclass(frozen=True)
class LinkUse:
    """The use of a link in an iteration, by all-to-alls, exchange, and tokens of experts.

    Args:
        bytes: bytes that cross it.
        busy_share: part of the iteration that these bytes take at the link's full rate.
    """

    name: str
    bytes: float
    busy_share: float
    most_at_once: int


@dataclass(frozen=True)
class Simulation:
    """A simulated iteration.

    Args:
        iteration_s: seconds of the iteration.
        tokens_per_s: global batch x sequence length / `iteration_s`.
        phases: phases along the critical path; they add up to `iteration_s`.
        once: what each stage does once an iteration, with simulated times of a layer.
        ranks: ranks of the job, ascending.
        spans: replayed activities: a few layers of one micro-batch, forward and backward.
        pipeline: passes of each replica, by stage and begin.
        links: links, the busiest first.
        layers: number of replayed layers of each stage and kind; the largest where they differ.
        kinds: names of the model's kinds of layers; one empty name where all are alike.
    """

    iteration_s: float
    tokens_per_s: float
    phases: Phases
    once: Once
    ranks: tuple[RankTimeline, ...]
    spans: tuple[Span, ...]
    pipeline: tuple[tuple[PassSpan, ...], ...]
    links: tuple[LinkUse, ...]
    layers: int
    stage_layers: int
    kinds: tuple[str, ...] = ("",)

    @property
    def idle_share(self) -> float:
        """Part of all ranks' time in which they neither compute nor communicate."""
        return sum(rank.idle_share for rank in self.ranks) / len(self.ranks)


@dataclass(frozen=True)
class PhaseComparison:
    """A phase in the cost model and in the simulator.

    Args:
        phase: a phase of `Phases`, or ``iteration``.
    """

    phase: str
    model_s: float
    simulated_s: float

    @property
    def difference_s(self) -> float:
        """Seconds by which the simulator exceeds the model."""
        return self.simulated_s - self.model_s


def compare_with_model(simulation: Simulation, cost: IterationCost) -> tuple[PhaseComparison, ...]:
    """Return the phases that take time, and last the whole iteration, in the cost model and simulated."""
    simulated = simulation.phases.by_name
    rows = (PhaseComparison(name, seconds, simulated[name]) for name, seconds in cost.phases.by_name.items())
    least_s = _ROUNDING * cost.iteration_s
    whole = PhaseComparison("iteration", cost.iteration_s, simulation.iteration_s)
    return (*(row for row in rows if max(row.model_s, row.simulated_s) > least_s), whole)
