"""A whole iteration: layers replayed event by event, stages step by step, the rest from the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, Timing
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.once import iteration_phases, once_an_iteration, replica_waits
from megatron_hexi.cost.pipeline import PassSpan
from megatron_hexi.cost.ranks import section_ranks
from megatron_hexi.cost.replica_pipelines import replica_lanes
from megatron_hexi.cost.sections import Section
from megatron_hexi.grouping import grouped
from megatron_hexi.lab.simulator.engine import Progress
from megatron_hexi.lab.simulator.extend import StageTimes, extend_stage
from megatron_hexi.lab.simulator.replay import SectionReplay, replay_layers
from megatron_hexi.lab.simulator.simulation import LinkUse, RankTimeline, Simulation, Span
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.report.tables import kind_names


def simulate(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    gpus: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate an iteration of a plan.

    Args:
        gpus: the cluster's GPU of each rank of the job; ``None``: the plan's, or else all of the cluster in
            file order.

    Raises:
        PlanError: the plan was made for another job.
        ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
    """
    timing = CostModel(job, cluster).timing(plan, gpus)
    sections = timing.sections
    replays = _replays(cluster, timing, progress)
    stages = [
        extend_stage(section, own, cost)
        for section, own, cost in zip(sections, replays, timing.stages, strict=True)
    ]
    costs = [stage.cost for stage in stages]
    once = once_an_iteration(job, sections, costs, timing.reductions, timing.optimizer)
    stage_lanes = replica_lanes(
        sections, ((stage.replicas, stage.forward.tolist()) for stage in stages), timing.micro_batches
    )
    pipelines = [
        replace(known, lanes=lanes) for known, lanes in zip(timing.pipelines, stage_lanes, strict=True)
    ]
    phases = iteration_phases([one.phases_of_passes for one in pipelines], once, timing.spread)
    return Simulation(
        iteration_s=phases.total,
        tokens_per_s=job.global_batch_size * job.seq_length / phases.total,
        phases=phases,
        once=once,
        ranks=_ranks(cluster, timing, stages, replica_waits(once, len(pipelines)), phases.total),
        spans=tuple(
            span for section, own in zip(sections, replays, strict=True) for span in _spans(section, own)
        ),
        pipeline=tuple(
            tuple(_with_encoder(one.spans(), replica, timing)) for replica, one in enumerate(pipelines)
        ),
        links=_links(timing, replays, stages, phases.total),
        layers=max(replay.whole.layers for own in replays for replay in own),
        stage_layers=max(max(section.by_domain(section.parts.layers)) for section in sections),
        kinds=kind_names(job.model),
    )


def _with_encoder(spans: Iterable[PassSpan], replica: int, timing: Timing) -> Iterator[PassSpan]:
    """Yield a replica's passes, and apart from these the time in which its slowest unit encodes images."""
    seconds = dict[str, float](forward=0.0, backward=0.0)
    for section, cost in zip(timing.sections, timing.stages, strict=True):
        own = section.replica == replica
        for work in cost.first if section.number == 0 and own.any() else ():
            seconds = {way: max(most, getattr(work.passes, way)[own].max()) for way, most in seconds.items()}
    for span in spans:
        taken = min(seconds[span.way], span.end_s - span.start_s) if span.stage == span.chunk == 0 else 0.0
        is_forward = span.way == "forward"
        cut = span.start_s + taken if is_forward else span.end_s - taken
        first, last = span._replace(end_s=cut), span._replace(start_s=cut)
        own, rest = (first, last) if is_forward else (last, first)
        parts = sorted((own._replace(way="encoder"), rest), key=lambda one: one.start_s)
        yield from parts if taken else (span,)


def _replays(cluster: Cluster, timing: Timing, progress: Progress | None) -> list[list[SectionReplay]]:
    """Return for each section the replays of the kinds of layers that it has."""
    meetings = list(_meetings(timing))
    replays: list[list[SectionReplay]] = [[] for _ in timing.sections]
    for number, (kind, own) in enumerate(meetings):

        def report(parts_done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + parts_done, len(meetings) * total)

        has_experts = timing.sections[0].job.kinds[kind].model.experts is not None
        found = replay_layers(
            [timing.sections[section] for section in own],
            [timing.stages[section] for section in own],
            [timing.experts[section] if has_experts else None for section in own],
            kind,
            cluster,
            report,
        )
        for section, replay in zip(own, found, strict=True):
            if _has_kind(timing.sections[section], kind):
                replays[section].append(replay)
    return replays


def _meetings(timing: Timing) -> Iterator[tuple[int, list[int]]]:
    """Yield each kind of layers with each set of sections whose layers of this kind are replayed together.

    In layers with experts, a set is the sections of a stage that recompute alike: they exchange tokens and so
    go through the layers together. In other layers each section is a set by itself.
    """
    sections = timing.sections
    for kind, job in enumerate(sections[0].job.kinds):
        keys = (
            number if job.model.experts is None else (section.number, section.job.recompute)
            for number, section in enumerate(sections)
        )
        for own in grouped((key, number) for number, key in enumerate(keys)).values():
            if any(_has_kind(sections[number], kind) for number in own):
                yield kind, own


def _has_kind(section: Section, kind: int) -> bool:
    parts, model = section.parts, section.job.model
    # Of a stage that encodes images alone a layer is replayed, and counts for none.
    return bool(np.any(parts.of_kinds(model)[kind].layers)) or (kind == 0 and not np.any(parts.layers))


def _ranks(
    cluster: Cluster, timing: Timing, stages: Sequence[StageTimes], waits: Sequence[float], whole: float
) -> tuple[RankTimeline, ...]:
    ranks: list[RankTimeline] = []
    for number, (section, stage) in enumerate(zip(timing.sections, stages, strict=True)):
        replica, turns = section.replica, section.turns(timing.micro_batches)
        work: dict[str, Floats] = {
            "token": turns * stage.busy["token"],
            "attention": turns * stage.busy["attention"],
            **({} if timing.experts[number] is None else {"experts": turns * stage.busy["experts"]}),
            **{end.name: turns * end.busy for end in timing.stages[number].ends},
            "optimizer": timing.optimizer[number],
        }
        communication = turns * stage.communication + np.array(waits)[replica]
        for unit, place in section_ranks(cluster, section):
            busy = {kind: float(seconds[unit]) for kind, seconds in work.items()}
            # Rounding must not make the idle time negative.
            idle = max(0.0, whole - sum(busy.values()) - float(communication[unit]))
            ranks.append(
                RankTimeline(
                    **vars(place),
                    section=number,
                    busy=busy,
                    communication_s=float(communication[unit]),
                    idle_s=idle,
                    idle_share=idle / whole,
                )
            )
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def _spans(section: Section, replays: Sequence[SectionReplay]) -> list[Span]:
    """Return the activities of a section's units, one kind of layers behind the other."""
    spans, begin = list[Span](), 0.0
    for replay in replays:
        first = replay.units.start
        for activity in replay.whole.log.activities:
            if not first <= activity.unit < replay.units.stop:
                continue
            lap, rank = replay.laps[activity.lap], int(section.ranks[activity.unit - first, 0])
            times = begin + activity.start, begin + activity.end
            spans.append(
                Span(
                    rank, activity.lane, activity.kind, activity.name, *times, lap.layer, lap.way, replay.kind
                )
            )
        begin += replay.whole.log.end
    return sorted(spans, key=lambda span: (span.rank, span.lane, span.start_s))


def _links(
    timing: Timing, replays: Sequence[Sequence[SectionReplay]], stages: Sequence[StageTimes], whole: float
) -> tuple[LinkUse, ...]:
    """Return the use of links over all layers and micro-batches; the largest share first."""
    sizes: dict[str, float] = defaultdict(float)
    capacity: dict[str, float] = {}
    most: dict[str, int] = defaultdict(int)
    for section, own, stage in zip(timing.sections, replays, stages, strict=True):
        for replay, times in zip(own, stage.times, strict=True):
            carried = _carried(replay, times * section.turns(timing.micro_batches))
            table = replay.whole.table
            for link, name in enumerate(table.names):
                sizes[name] += float(carried[link])
                capacity[name] = float(table.capacity[link])
                most[name] = max(most[name], replay.whole.log.most_at_once[link])
    uses = [LinkUse(name, size, size / capacity[name] / whole, most[name]) for name, size in sizes.items()]
    return tuple(sorted(uses, key=lambda use: -use.busy_share))


def _carried(replay: SectionReplay, times: Floats) -> Floats:
    """Return bytes that a section sends on each link in an iteration.

    Args:
        times: number of each unit's layer passes, [passes, U].
    """
    program, table, first = replay.whole.program, replay.whole.table, replay.units.start
    own = (first <= program.src) & (program.src < replay.units.stop)
    size = program.size[own] * times[program.pass_numbers[own], program.src[own] - first]
    routes = program.route[own]
    loads = table.weights[routes] * size[:, None]
    return np.bincount(table.links[routes].ravel(), loads.ravel(), len(table.capacity))
