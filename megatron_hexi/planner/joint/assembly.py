"""Builds a timed plan from packed replicas: GPUs, each stage's domain, and layers reassigned.

Tables decide which stages there are. Here each stage gets a layout, in the memory that its layers and its
position in the pipeline leave. As it may be faster or slower than its table, layers are then reassigned once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.plan import Exchange, Plan, Replica
from megatron_hexi.plan import Stage as PlanStage
from megatron_hexi.plan.proportion import worthwhile_parts
from megatron_hexi.plan.recompute import Again, of_layer
from megatron_hexi.planner.expert_placement import placement
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.packing import Packed
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage
from megatron_hexi.planner.joint.placing import StageGpus, StagePlace, find_gpus, number_ranks
from megatron_hexi.planner.joint.pools import Pools
from megatron_hexi.planner.layouts.layout import Layout, build_domain, with_experts
from megatron_hexi.planner.layouts.trial import Candidate, Judge, Trial, order_of
from megatron_hexi.planner.request import Request
from megatron_hexi.planner.search.domain import DomainSearch

#: Fullness of memory from which on fewer micro-batches in flight may allow a better layout.
_TIGHT = 0.95


class Assembly:
    """Builds plans for one micro-batch size; equal stages are searched once.

    Args:
        timer: the timer of layers, with the jobs of each tensor-parallel size.
        search: the pipeline search, which assigns layers to stages.
    """

    def __init__(self, request: Request, timer: LayerTimer, search: PipelineSearch, pools: Pools) -> None:
        self._job, self._timer, self._search = request.job, timer, search
        self._pools, self._cluster = pools, pools.cluster
        self._found = timer.known.domains.setdefault(pools.usable_gib, {})
        #: The last trial of equal units with the same recomputation.
        self._layouts: dict[tuple[object, ...], Trial] = {}
        #: Searches of domains, by all that their results depend on.
        self._searches: dict[tuple[object, ...], DomainSearch] = {}
        #: Polished trials of these, by all that they depend on if memory is not short.
        self._searched: dict[tuple[object, ...], Trial] = {}
        self._polished = True
        self._units = cache(lambda width, gpus: find_units(timer.job(width), self._cluster, gpus))
        #: The cost model of plans with stages, which knows the layers of those before.
        self._model = cache(partial(CostModel, cluster=self._cluster))
        self.trials = 0

    def run(self, packed: Packed, *, polished: bool) -> Candidate | None:
        """Return the plan of packed replicas; ``None``: the nodes cannot be cut into their stages.

        Args:
            polished: whether every domain is polished; not while plans are compared.
        """
        self._polished = polished
        pipes = [column.pipe for column in packed.columns]
        placed = find_gpus(self._pools, [pipe.shapes for pipe in pipes])
        if placed is None:
            return None
        best = self._assemble(pipes, packed.micro_batches, placed)
        again: list[Pipe] = []
        for number, (column, count) in enumerate(zip(packed.columns, packed.micro_batches, strict=True)):
            depth = len(column.pipe.stages)
            trials = [best[1][StagePlace(number, stage, depth)] for stage in range(depth)]
            again.append(self._reassigned(column.pipe, count, column.shards, trials))
        if again != pipes:
            other = self._assemble(again, packed.micro_batches, placed)
            if other[0].order < best[0].order:
                best, pipes = other, again
        shapes = [pipe.shapes for pipe in pipes]
        beside = find_gpus(self._pools, shapes, beside_alike=True) if len(pipes) > 1 else None
        if beside is not None and beside != placed:
            other = self._assemble(pipes, packed.micro_batches, beside)
            best = min(best, other, key=lambda assembled: assembled[0].order)
        return best[0]

    def _assemble(
        self,
        pipes: Sequence[Pipe],
        micro_batches: Sequence[int],
        placed: StageGpus,
    ) -> tuple[Candidate, dict[StagePlace, Trial]]:
        """Return the plan with its timing, and the trial of each stage's domain."""
        trials = {}
        for place in sorted(placed):
            stage = pipes[place.replica].stages[place.stage]
            first = sum(before.layers for before in pipes[place.replica].stages[: place.stage])
            units = self._units(stage.shape.width, frozenset(placed[place]))
            fleet = replace(units, experts=self._timer.experts)
            count = micro_batches[place.replica]
            trials[place] = self._domain(fleet, place, stage, first, count, len(pipes))
        # Megatron's flags put experts elsewhere than a plan does.
        by_flags = _fit_flags(pipes) and self._job.model.experts is None
        build = self._repeated if by_flags else self._staged
        return build(pipes, micro_batches, placed, trials), trials

    def _domain(
        self,
        fleet: Fleet,
        place: StagePlace,
        stage: PipeStage,
        first_layer: int,
        micro_batches: int,
        replicas: int,
    ) -> Trial:
        """Return the best domain found on the GPUs of a stage.

        `first_layer` is the number of the stage's first layer in the model.
        """
        part = ModelPart(
            layers=stage.layers,
            again=Again.of(stage.recompute).layers(stage.layers),
            is_first=place.is_first,
            is_last=place.is_last,
            ahead=place.stages - place.stage,
            ranges=((first_layer, first_layer + stage.layers),),
        )
        job = replace(
            fleet.job,
            recompute=of_layer(stage.recompute),
            global_batch_size=micro_batches * fleet.job.micro_batch_size,
        )
        shards = len(fleet.units) * replicas
        kind = _alike(fleet), job.tensor_parallel, job.recompute
        devices = {id(self._cluster.ranks[unit.gpus[0][0]].device) for unit in fleet.units}
        placed = placement(fleet.experts, len(fleet.units), job.tensor_parallel, is_mixed=len(devices) > 1)
        held = [count for kind in part.of_kinds(job.model) for count in kind]
        work = (*kind, placed, micro_batches, shards, place.is_last)
        # Without the loss, more layers of the same mix need the same layout.
        mix = held if place.is_last else [count / part.layers for count in held]
        searched = (*work, *held, place.is_first, part.ahead)
        name = (*searched, self._polished)
        fleet = replace(fleet, job=job, part=part)
        if name not in self._found:
            judge = Judge(fleet, shards)
            known, like = self._layouts.get(kind), self._searched.get((*work, *mix))
            trial, room = None, 1.0
            if searched not in self._searches:
                self._searches[searched] = DomainSearch(judge, fleet, micro_batches)
            search = self._searches[searched]
            if self._polished and like is not None and like.timing.fullness < _TIGHT:
                # Memory was not short, and is not short here.
                trial, room = judge.try_out(fleet, like.layouts, like.window), _TIGHT
            elif known is not None and not self._polished:
                # With other layers the same layout is as good, as long as memory has room for it.
                layout = replace(known.layouts[0], micro_batches=micro_batches)
                trial = judge.try_out(fleet, [layout], known.window)
            if trial is None or trial.timing.fullness > room:
                trial = search.run(self._polished)
                if self._polished:
                    trial = self._searched[*work, *mix] = trial
            self._found[name] = trial
            self.trials += judge.trials
        self._layouts[kind] = self._found[name]
        return replace(self._found[name], fleet=fleet)

    def _reassigned(self, pipe: Pipe, micro_batches: int, shards: int, trials: Sequence[Trial]) -> Pipe:
        """Return the pipeline with layers reassigned by the stages' timed seconds."""
        took = [
            (stage.layers, trial.timing.pipelines[0].stage_phases[0].total)
            for stage, trial in zip(pipe.stages, trials, strict=True)
        ]
        layered = self._search.layered(pipe.shapes, micro_batches, shards, timed=True, took=took)
        if layered is None:
            return pipe
        both = zip(pipe.stages, layered.stages, strict=True)
        return replace(pipe, stages=tuple(old if old.layers == new.layers else new for old, new in both))

    def _repeated(
        self,
        pipes: Sequence[Pipe],
        micro_batches: Sequence[int],
        placed: StageGpus,
        trials: dict[StagePlace, Trial],
    ) -> Candidate:
        """Return the best plan whose replicas are one stage each and differ only in their domains."""
        stage, count = pipes[0].stages[0], len(pipes)
        together = sum(micro_batches) * self._timer.micro_batch_size
        job = replace(
            self._timer.job(stage.shape.width),
            recompute=stage.recompute,
            global_batch_size=together,
            data_parallel=count,
        )
        fleet = find_units(job, self._cluster, {gpu for gpus in placed.values() for gpu in gpus})
        number = {unit.gpus: place for place, unit in enumerate(fleet.units)}
        layouts = []
        for place, trial in sorted(trials.items()):
            units = [number[unit.gpus] for unit in trial.fleet.units]
            parts = tuple(
                replace(part, units=tuple(units[unit] for unit in part.units))
                for part in trial.layouts[0].parts
            )
            layouts.append(Layout(parts, micro_batches[place.replica]))
        judge = Judge(fleet)
        windows = sorted({trial.window for trial in trials.values()})
        tried = [judge.try_out(fleet, layouts, window) for window in windows]
        best = min(tried, key=order_of)
        self.trials += judge.trials
        return best

    def _staged(
        self,
        pipes: Sequence[Pipe],
        micro_batches: Sequence[int],
        placed: StageGpus,
        trials: dict[StagePlace, Trial],
    ) -> Candidate:
        """Build a plan with `layers` in each stage, and time it."""
        gpus = number_ranks(self._cluster, placed)
        rank = {gpu: number for number, gpu in enumerate(gpus)}
        replicas = []
        for number, (pipe, count) in enumerate(zip(pipes, micro_batches, strict=True)):
            stages = []
            first = 0
            for s, stage in enumerate(pipe.stages):
                trial = trials[StagePlace(number, s, len(pipe.stages))]
                ranks = {
                    unit: tuple(sorted(rank[gpu] for gpu in fleet_unit.gpus[0]))
                    for unit, fleet_unit in enumerate(trial.fleet.units)
                }
                domain = build_domain(trial.fleet, trial.layouts[0], ranks, gpus)
                alone = Replica((PlanStage((domain,)),))
                layers = first, first + stage.layers
                exchange = Exchange(trial.window, worthwhile_parts([alone]))
                stages.append(
                    PlanStage((domain,), layers=layers, recompute=stage.recompute, exchange=exchange)
                )
                first += stage.layers
            replicas.append(Replica(tuple(stages), count))
        widths = {stage.shape.width for pipe in pipes for stage in pipe.stages}
        width = widths.pop() if len(widths) == 1 else 0
        workload = replace(with_experts(self._job.workload(), self._job), tensor_parallel=width)
        everything = gpus == list(range(len(self._cluster.ranks)))
        plan = Plan(workload, tuple(replicas), gpus=None if everything else tuple(gpus))
        job = replace(
            self._job,
            tensor_parallel=width or 1,
            pipeline_parallel=1,
            micro_batch_size=self._timer.micro_batch_size,
            recompute="none",
            data_parallel=len(pipes),
        )
        return Candidate(plan, job, self._model(job).timing(plan))


def _fit_flags(pipes: Sequence[Pipe]) -> bool:
    """Whether all replicas have a single stage that Megatron's flags describe."""
    kinds = {(len(pipe.stages), pipe.stages[0].shape.width, pipe.stages[0].recompute) for pipe in pipes}
    return len(kinds) == 1 and len(pipes[0].stages) == 1


def _alike(fleet: Fleet) -> tuple[object, ...]:
    """Return a key that is the same for equal fleets: units by kind, by shared nodes, and by links."""
    cluster = fleet.cluster
    order = {site: number for number, site in enumerate(dict.fromkeys(unit.site for unit in fleet.units))}
    units = []
    for unit in fleet.units:
        node = cluster.nodes[cluster.ranks[unit.gpus[0][0]].node]
        units.append((id(node.device), order[unit.site], node.bandwidth, node.latency_s, node.cards))
    firsts = [fleet.units[site[0]].gpus[0][0] for site in fleet.sites]
    apart = tuple(cluster.distance(*ends) for ends in itertools.pairwise(firsts))
    return (*units, apart)
