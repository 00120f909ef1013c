"""A whole iteration: layers replayed event by event, stages step by step, the rest from the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, Job, Phases, Timing
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.cost.replica_pipelines import replica_lanes
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import exposed_synchronisation
from megatron_hexi.errors import PlanError
from megatron_hexi.lab.simulator.engine import Progress
from megatron_hexi.lab.simulator.extend import StageTimes, extend_stage
from megatron_hexi.lab.simulator.findings import find
from megatron_hexi.lab.simulator.ministage_replay import replay_ministages
from megatron_hexi.lab.simulator.pipeline_replay import pipeline_phases, replay_pipeline
from megatron_hexi.lab.simulator.replay import Replay, replay_section
from megatron_hexi.lab.simulator.simulation import LinkUse, PipelineSpan, RankTimeline, Simulation, Span
from megatron_hexi.lab.simulator.work import LayerWork, layer_work
from megatron_hexi.plan import Plan

#: Least number of layers that are replayed forward and backward: all units begin the first together, the
#: other two show the steady state.
LEAST_LAYERS = 3
#: More layers are replayed up to this total of messages, which take a few tenths of a second.
MOST_MESSAGES = 5_000


def simulate(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    gpus: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate an iteration of a plan.

    Args:
        plan: a plan that passed its checks.
        job: the job.
        cluster: the cluster.
        gpus: the cluster's GPU of each rank of the job; ``None``: the plan's, or else all of the cluster in
            file order.
        progress: callback: receives the parts done and their total, about a hundred times.

    Raises:
        PlanError: the plan was made for another job, the model's layers are of several kinds, or
            have experts.
        ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
    """
    if not job.model.is_uniform:
        raise PlanError(
            f"--model {job.model.name}: its layers are of {len(job.model.kinds)} kinds, and the simulator "
            "replays those of one; see what the plan takes with hexi validate"
        )
    if job.model.experts is not None:
        raise PlanError(
            f"--model {job.model.name}: the simulator does not replay how tokens travel to experts; see "
            "what the plan takes with hexi validate"
        )
    timing = CostModel(job, cluster).timing(plan, gpus)
    sections = timing.sections
    works = [
        layer_work(section.arrays, section.job, section.placement.stage, cost.layer)
        for section, cost in zip(sections, timing.stages, strict=True)
    ]
    layers = [_layers(section, work) for section, work in zip(sections, works, strict=True)]
    replays = _replays(cluster, timing, works, layers, progress)
    stages = [
        extend_stage(section, replay, cost, count)
        for section, replay, cost, count in zip(sections, replays, timing.stages, layers, strict=True)
    ]
    waits = exposed_synchronisation(sections, [stage.cost for stage in stages], timing.reductions)
    stage_lanes = replica_lanes(
        sections, ((stage.replicas, stage.forward.tolist()) for stage in stages), timing.micro_batches
    )
    replicas, steps = list[Phases](), list[PipelineSpan]()
    for replica, wait in enumerate(waits):
        pipeline = timing.pipelines[replica]
        if isinstance(pipeline, MinistagePipeline):
            pipeline = replace(pipeline, lanes=stage_lanes[replica])
            spans, _ = replay_ministages(pipeline, replica)
            phases_of_replica = pipeline.busiest + pipeline.waits(
                lambda other: replay_ministages(other, 0)[1]
            )
        else:
            pipeline = replace(pipeline, stages=tuple(lane.phases for (lane,) in stage_lanes[replica]))
            forward = [lane.forward_s for (lane,) in stage_lanes[replica]]
            spans = replay_pipeline(pipeline, forward, replica)
            phases_of_replica = pipeline_phases(pipeline, forward, spans)
        replicas.append(phases_of_replica + Phases(gradients=wait))
        steps += spans
    step = max(float(times.max()) for times in timing.optimizer)
    phases = max(replicas, key=lambda phases: phases.total) + Phases(optimizer=step)
    return Simulation(
        iteration_s=phases.total,
        tokens_per_s=job.global_batch_size * job.seq_length / phases.total,
        phases=phases,
        ranks=_ranks(cluster, timing, stages, waits, phases.total),
        spans=tuple(
            span
            for section, replay in zip(sections, replays, strict=True)
            for span in _spans(section, replay)
        ),
        pipeline=tuple(steps),
        links=_links(timing, replays, stages, phases.total),
        findings=find(replays),
        layers=max(layers),
        stage_layers=max(max(section.by_domain(section.parts.layers)) for section in sections),
    )


def _layers(section: Section, work: LayerWork) -> int:
    """Return the number of layers to replay."""
    messages = work.messages(section.job.mode != "none")
    fewest = min(section.by_domain(section.parts.layers))
    return min(fewest, max(LEAST_LAYERS, MOST_MESSAGES // max(1, messages)))


def _replays(
    cluster: Cluster,
    timing: Timing,
    works: Sequence[LayerWork],
    layers: Sequence[int],
    progress: Progress | None,
) -> list[Replay]:
    count = len(works)
    replays: list[Replay] = []
    for number, (section, cost) in enumerate(zip(timing.sections, timing.stages, strict=True)):

        def report(parts_done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + parts_done, count * total)

        replays.append(replay_section(section, cost, works[number], cluster, layers[number], report))
    return replays


def _ranks(
    cluster: Cluster, timing: Timing, stages: Sequence[StageTimes], waits: Sequence[float], whole: float
) -> tuple[RankTimeline, ...]:
    ranks: list[RankTimeline] = []
    for number, (section, stage) in enumerate(zip(timing.sections, stages, strict=True)):
        replica, turns = section.replica, section.turns(timing.micro_batches)
        work = {
            "token": turns * stage.token,
            "attention": turns * stage.attention,
            "logits": turns * timing.stages[number].logits,
            "optimizer": timing.optimizer[number],
        }
        communication = turns * stage.communication + np.array(waits)[replica]
        for unit, numbers in enumerate(section.ranks):
            busy = {kind: float(seconds[unit]) for kind, seconds in work.items()}
            # Rounding must not make the idle time negative.
            idle = max(0.0, whole - sum(busy.values()) - float(communication[unit]))
            for rank, gpu in zip(numbers.tolist(), section.placement.gpus[unit].tolist(), strict=True):
                ranks.append(
                    RankTimeline(
                        rank=rank,
                        gpu=gpu,
                        name=cluster.rank_name(gpu),
                        device=cluster.ranks[gpu].device.name,
                        stage=section.number,
                        unit=int(section.units[unit]),
                        section=number,
                        busy=busy,
                        communication_s=float(communication[unit]),
                        idle_s=idle,
                        idle_share=idle / whole,
                    )
                )
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def _spans(section: Section, replay: Replay) -> list[Span]:
    spans = []
    for activity in replay.log.activities:
        lap, rank = replay.laps[activity.lap], int(section.ranks[activity.unit, 0])
        spans.append(
            Span(
                rank,
                activity.lane,
                activity.kind,
                activity.name,
                activity.start,
                activity.end,
                lap.layer,
                lap.way,
            )
        )
    return sorted(spans, key=lambda span: (span.rank, span.lane, span.start_s))


def _links(
    timing: Timing, replays: Sequence[Replay], stages: Sequence[StageTimes], whole: float
) -> tuple[LinkUse, ...]:
    """Return the use of links over all layers and micro-batches; the largest share first."""
    sizes: dict[str, float] = defaultdict(float)
    capacity: dict[str, float] = {}
    most: dict[str, int] = defaultdict(int)
    for section, replay, stage in zip(timing.sections, replays, stages, strict=True):
        carried = _carried(replay, stage.times * section.turns(timing.micro_batches))
        for link, name in enumerate(replay.table.names):
            sizes[name] += float(carried[link])
            capacity[name] = float(replay.table.capacity[link])
            most[name] = max(most[name], replay.log.meetings.most[link])
    uses = [LinkUse(name, size, size / capacity[name] / whole, most[name]) for name, size in sizes.items()]
    return tuple(sorted(uses, key=lambda use: -use.busy_share))


def _carried(replay: Replay, times: Floats) -> Floats:
    """Return bytes on each link in an iteration; `times` counts each unit's layer passes, [passes, U]."""
    program, table = replay.program, replay.table
    laps = np.array(program.set_laps, dtype=np.int64)[program.sets]
    size = program.size * times[laps, program.src]
    loads = table.weights[replay.route] * size[:, None]
    return np.bincount(table.links[replay.route].ravel(), loads.ravel(), len(table.capacity))
