"""A whole iteration: layers replayed event by event, the rest put together as the cost model does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, Job, Phases, Timing
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.compute import Speeds, device_speeds
from megatron_hexi.cost.layer import Stage
from megatron_hexi.cost.stage import exposed_synchronisation
from megatron_hexi.plan import Plan
from megatron_hexi.simulator.engine import Progress
from megatron_hexi.simulator.extend import StageTimes, extend_stage
from megatron_hexi.simulator.findings import find
from megatron_hexi.simulator.replay import Replay, replay_stage
from megatron_hexi.simulator.simulation import LinkUse, RankTimeline, Simulation, Span
from megatron_hexi.simulator.work import LayerWork, layer_work

#: So many layers are replayed forward, and backward, at least: all units begin the first one together, the
#: other two show what goes on.
LEAST_LAYERS = 3
#: As many more are replayed as have no more messages than this together, which take a few tenths of a second.
MOST_MESSAGES = 5_000


def simulate(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    gpus: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Replay a plan.

    Args:
        plan: a plan that passed its checks.
        job: the job.
        cluster: the cluster.
        gpus: the cluster's rank of each rank of the job; ``None``: those that the plan names, or else all of
            the cluster in file order.
        progress: told how much of how much is done, about a hundred times.

    Raises:
        PlanError: the plan was made for another job.
        ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
    """
    model = CostModel(job, cluster)
    timing = model.timing(plan, gpus)
    speeds = tuple(device_speeds(device, job) for device in timing.placement.devices)
    works = [
        layer_work(timing.arrays, job, speeds, kinds, cost.layer)
        for kinds, cost in zip(timing.placement.kinds, timing.stages, strict=True)
    ]
    layers = _layers(job, works[0])
    replays = _replays(plan, job, cluster, timing, works, layers, progress)
    stages = [extend_stage(replay, cost, layers) for replay, cost in zip(replays, timing.stages, strict=True)]
    waits = exposed_synchronisation(
        timing.arrays, job, _places(timing, speeds, cluster), [stage.cost for stage in stages], model.rings
    )
    replicas = [
        _replica_phases([stage.replicas[number] for stage in stages], int(count))
        + Phases(gradients=waits[number])
        for number, count in enumerate(timing.micro_batches)
    ]
    step = max(float(times.max()) for times in timing.optimizer)
    phases = max(replicas, key=lambda phases: phases.total) + Phases(optimizer=step)
    return Simulation(
        iteration_s=phases.total,
        tokens_per_s=job.global_batch_size * job.seq_length / phases.total,
        phases=phases,
        ranks=_ranks(cluster, timing, stages, waits, phases.total),
        spans=tuple(span for number, replay in enumerate(replays) for span in _spans(replay, number, job)),
        links=_links(timing, replays, stages, phases.total),
        findings=find(replays),
        layers=layers,
        stage_layers=job.stage_layers,
    )


def _layers(job: Job, work: LayerWork) -> int:
    """How many layers are replayed."""
    each = work.messages(job.recompute != "none")
    return min(job.stage_layers, max(LEAST_LAYERS, MOST_MESSAGES // max(1, each)))


def _replays(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    timing: Timing,
    works: Sequence[LayerWork],
    layers: int,
    progress: Progress | None,
) -> list[Replay]:
    count, window = len(works), plan.exchange.window
    replays: list[Replay] = []
    for number, (work, cost) in enumerate(zip(works, timing.stages, strict=True)):

        def report(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + done, count * total)

        gpus, last = timing.placement.gpus[number, :, 0], number == count - 1
        replays.append(
            replay_stage(timing.arrays, job, cluster, gpus, work, cost, window, layers, last, report)
        )
    return replays


def _places(timing: Timing, speeds: tuple[Speeds, ...], cluster: Cluster) -> list[Stage]:
    """Where the units of each stage are, for the model's rings."""
    places = []
    for gpus, kinds in zip(timing.placement.gpus[:, :, 0], timing.placement.kinds, strict=True):
        nodes = [cluster.nodes[cluster.ranks[gpu].node] for gpu in gpus]
        bandwidth = np.array([node.bandwidth for node in nodes])
        latency = np.array([node.latency_s for node in nodes])
        places.append(Stage(gpus, kinds, speeds, bandwidth, latency))
    return places


def _replica_phases(stages: Sequence[Phases], micro_batches: int) -> Phases:
    """1F1B, as in cost/iteration.py."""
    slowest = max(stages, key=lambda phases: phases.total)
    others = sum(phases.total for phases in stages) - slowest.total
    return slowest * micro_batches + Phases(bubble=others)


def _ranks(
    cluster: Cluster, timing: Timing, stages: Sequence[StageTimes], waits: Sequence[float], whole: float
) -> tuple[RankTimeline, ...]:
    ranks: list[RankTimeline] = []
    replica = timing.arrays.unit_replica
    turns = timing.micro_batches[replica]
    for number, stage in enumerate(stages):
        cost, optimizer = timing.stages[number], timing.optimizer[number]
        work = {
            "token": turns * stage.token,
            "attention": turns * stage.attention,
            "logits": turns * cost.logits,
            "optimizer": optimizer,
        }
        communication = turns * stage.communication + np.array(waits)[replica]
        for unit, gpus in enumerate(timing.placement.gpus[number]):
            busy = {kind: float(seconds[unit]) for kind, seconds in work.items()}
            # Rounding must not make a rank that never waits wait less than nothing.
            idle = max(0.0, whole - sum(busy.values()) - float(communication[unit]))
            for gpu in map(int, gpus):
                ranks.append(
                    RankTimeline(
                        rank=len(ranks),
                        gpu=gpu,
                        name=cluster.rank_name(gpu),
                        device=cluster.ranks[gpu].device.name,
                        stage=number,
                        unit=unit,
                        busy=busy,
                        communication_s=float(communication[unit]),
                        idle_s=idle,
                        idle_share=idle / whole,
                    )
                )
    return tuple(ranks)


def _spans(replay: Replay, stage: int, job: Job) -> list[Span]:
    first = stage * len(replay.program.units)
    spans = []
    for piece in replay.log.pieces:
        lap = replay.laps[piece.lap]
        rank = (first + piece.unit) * job.tensor_parallel
        spans.append(
            Span(rank, piece.lane, piece.kind, piece.name, piece.start, piece.end, lap.layer, lap.way)
        )
    return sorted(spans, key=lambda span: (span.rank, span.lane, span.start_s))


def _links(
    timing: Timing, replays: Sequence[Replay], stages: Sequence[StageTimes], whole: float
) -> tuple[LinkUse, ...]:
    """Bytes of all layers and micro-batches; the largest share of the iteration first."""
    sizes: dict[str, float] = defaultdict(float)
    capacity: dict[str, float] = {}
    most: dict[str, int] = defaultdict(int)
    turns = timing.micro_batches[timing.arrays.unit_replica]
    for replay, stage in zip(replays, stages, strict=True):
        carried = _carried(replay, stage.times, turns)
        for link, name in enumerate(replay.table.names):
            sizes[name] += float(carried[link])
            capacity[name] = float(replay.table.capacity[link])
            most[name] = max(most[name], replay.log.meetings.most[link])
    uses = [LinkUse(name, size, size / capacity[name] / whole, most[name]) for name, size in sizes.items()]
    return tuple(sorted(uses, key=lambda use: -use.busy_share))


def _carried(replay: Replay, times: Floats, turns: Ints) -> Floats:
    """Bytes that cross each link in an iteration."""
    program, table = replay.program, replay.table
    laps = np.array(program.set_laps, dtype=np.int64)[program.sets]
    size = program.size * times[laps] * turns[program.src]
    loads = table.weights[replay.route] * size[:, None]
    return np.bincount(table.links[replay.route].ravel(), loads.ravel(), len(table.capacity))
