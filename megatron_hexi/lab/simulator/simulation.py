"""What a simulated iteration looks like: times of every rank, events, links, and what the model left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_hexi.cost import Phases

Lane = Literal["compute", "network"]


@dataclass(frozen=True)
class RankTimeline:
    """One rank's part of an iteration; times are seconds and add up to the iteration.

    Args:
        rank: its number in the job.
        gpu: its number in the cluster.
        name: of the GPU, for people: ``h100-0/3``.
        device: model of GPU.
        stage: its pipeline stage.
        unit: its member: its number in the stage, or in a plan whose stages have layers of their own.
        section: the units that it was replayed with, by number; their spans count from one start.
        busy: work by kind: ``token``, ``attention``, ``logits``, ``optimizer``; recomputation included.
        communication_s: waiting while its own messages are under way, sums inside a unit, and what shows of
            gradients and weights.
        idle_s: waiting for others, and for a pipeline to fill and drain.
        idle_share: part of the iteration that it idles.
    """

    rank: int
    gpu: int
    name: str
    device: str
    stage: int
    unit: int
    section: int
    busy: Mapping[str, float]
    communication_s: float
    idle_s: float
    idle_share: float

    @property
    def busy_s(self) -> float:
        """All its own work."""
        return sum(self.busy.values())


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, as it was replayed; each section of units counts from 0.

    Args:
        rank: whose; of a tensor-parallel unit the first, the others do the same.
        lane: ``compute`` or ``network``; on each lane of a rank one thing follows the other.
        kind: ``token``, ``attention``, ``logits``; ``all_to_all``, ``exchange``, ``tensor_parallel``.
        name: for people: ``own block``, ``blocks 2``, ``keys 2``.
        start_s: when it began.
        end_s: when it ended.
        layer: of the stage.
        way: ``forward``, ``logits``, ``again`` (recomputed) or ``backward``.
    """

    rank: int
    lane: Lane
    kind: str
    name: str
    start_s: float
    end_s: float
    layer: int
    way: str


@dataclass(frozen=True, slots=True)
class PipelineSpan:
    """A micro-batch in a stage of a replica, from the start of the iteration.

    Args:
        replica: number of the replica.
        stage: number of its stage.
        way: ``forward``, ``backward``, or ``turn`` for both of a replica's last ministage.
        micro_batch: number among those of the replica.
        lane: number among the stage's domains that take whole micro-batches, by the first of these; 0 where
            all share each.
        start_s: when it began.
        end_s: when it ended.
    """

    replica: int
    stage: int
    way: str
    micro_batch: int
    lane: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class LinkUse:
    """One link's part of an iteration: all-to-alls and exchange.

    Args:
        name: for people.
        bytes: that cross it.
        busy_share: part of the iteration that these take at the link's full rate.
        most_at_once: transfers that shared it at most.
    """

    name: str
    bytes: float
    busy_share: float
    most_at_once: int


@dataclass(frozen=True)
class Meeting:
    """Transfers that shared a full link although the model takes them never to meet.

    Args:
        link: its name.
        kinds: what they carried.
        share: part of the replayed time in which they did.
    """

    link: str
    kinds: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Scattering:
    """Transfers of one set that the model takes to share a link, and that did not all meet there.

    Args:
        kind: what they carried.
        link: its name.
        counted: transfers that the model counts together.
        met: how many shared the link at most.
        spared_s: seconds that those take which did not.
    """

    kind: str
    link: str
    counted: int
    met: int
    spared_s: float


@dataclass(frozen=True)
class Findings:
    """What happened in the replay that the model does not know.

    Args:
        meetings: most of the time first.
        scatterings: of each kind the one that spares most.
        lead: how far the first group of a replica passes the end of a layer before the last, as a part of
            that layer.
        unready: how far the first member of a group is ready for an all-to-all before the last, likewise.
        unsteady: how much the last two layers differ in time, as a part.
    """

    meetings: tuple[Meeting, ...]
    scatterings: tuple[Scattering, ...]
    lead: float
    unready: float
    unsteady: float


@dataclass(frozen=True)
class Simulation:
    """A simulated iteration.

    Args:
        iteration_s: seconds.
        tokens_per_s: global batch x sequence length over it.
        phases: where the time goes, along the slowest way; they add up to `iteration_s`.
        ranks: by rank of the job.
        spans: what was replayed: a few layers of one micro-batch, forward and backward.
        pipeline: the micro-batches in their stages, by replica and stage.
        links: the busiest first.
        findings: what the cost model does not know.
        layers: how many layers of each stage were replayed; of stages that differ, the most.
        stage_layers: how many it has, likewise.
    """

    iteration_s: float
    tokens_per_s: float
    phases: Phases
    ranks: tuple[RankTimeline, ...]
    spans: tuple[Span, ...]
    pipeline: tuple[PipelineSpan, ...]
    links: tuple[LinkUse, ...]
    findings: Findings
    layers: int
    stage_layers: int

    @property
    def idle_share(self) -> float:
        """Part of all ranks' time in which they neither compute nor communicate."""
        return sum(rank.idle_share for rank in self.ranks) / len(self.ranks)

    @property
    def exposed_communication_s(self) -> float:
        """Communication on the slowest way through the iteration that no work hides."""
        return self.phases.communication
