"""Times and memory of one layer, by the cost model, on any GPUs that a stage could have.

A domain is laid out for speed on the first GPUs of each pool, in the best of a few groupings, and timed. For
a stage on several pools the time is an estimate at first: the pools' own times, as if none waited for
another, times the factor by which waiting slows a small stage on the same pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import attention_seconds, ceiling_tokens_per_s, token_seconds
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.fp8 import computed_rows
from megatron_hexi.cost.layer import Layer
from megatron_hexi.cost.layer_bytes import border_bytes, prediction_bytes
from megatron_hexi.cost.memory import Holdings, allocated_bytes, part_memory
from megatron_hexi.cost.memory_terms import sum_terms
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.recomputed import work_again
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import free_network
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.planner.expert_placement import ExpertRule, placement
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.joint.pools import Pools, StageShape, is_exact
from megatron_hexi.planner.joint.stage_times import FirstTimes, KnownStages, LayerTimes
from megatron_hexi.planner.joint.synchronisation import Synchronisation
from megatron_hexi.planner.layouts.layout import Grouping
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.balance import rebalanced
from megatron_hexi.planner.search.groupings import spread
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.tried import WINDOW

#: Rounds of balancing for stages of several pools.
_ROUNDS = 2
#: Units of the small stages from which the waiting of all stages on the same pools is estimated.
_WAITING_UNITS = 8
#: Factor of the GPUs' memory with which layers are timed, so that any layer fits.
_ROOM = 2.0**10
#: The part of the model that is timed: one layer, with the embedding and the loss.
_ONE_LAYER = ModelPart(layers=1, again=1, is_first=True, is_last=True, ahead=1)
#: Numbers of a layer that pools side by side have less of, each by its share of the tokens.
_SHARED_SECONDS = ("forward", "backward", "logits")
_SHARED_BYTES = ("tokens", "kept", "working", "logits_bytes", "border_bytes", "experts")


class LayerTimer:
    """Predicts time and memory of layers by the cost model, each when it is first asked for.

    Args:
        job: a job of one micro-batch, with core attention recomputed.
        cluster: the cluster with the GPUs of the stages. Layers are predicted as if the GPUs had memory for
            them; `StageTables` checks whether they do.
        widths: tensor-parallel sizes that are tried.
        experts: how experts are placed on the ranks of a stage, if the model has experts.
        modes: what stages may compute again in each layer, from nothing to whole layers.
        known: what timers for other placements of experts have found; ``None``: there are none.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        widths: Sequence[int],
        experts: ExpertRule,
        modes: tuple[Recompute, ...],
        known: KnownStages | None = None,
    ) -> None:
        self.experts, self.offered, self.known = experts, modes, known or KnownStages()
        self.cluster, self.widths, self.micro_batch_size = cluster, widths, job.micro_batch_size
        speeds = {id(node.device): ceiling_tokens_per_s(job, [node.device]) for node in cluster.nodes}
        self.pools = Pools.of(cluster, [speeds[id(node.device)] for node in cluster.nodes])
        roomy = cluster.with_memory_margin(1 - _ROOM)
        self._fleets = {
            width: replace(
                find_units(replace(job, tensor_parallel=width), roomy), part=_ONE_LAYER, experts=experts
            )
            for width in widths
        }
        self._judges = {width: Judge(fleet) for width, fleet in self._fleets.items()}
        self._rates = {width: Rates(fleet, WINDOW) for width, fleet in self._fleets.items()}
        self.layer = cache(self._layer)
        #: Times what replicas add to an iteration; all searches share it.
        self.synchronisation = Synchronisation(self)
        self._waiting = cache(self._waiting_factor)

    @property
    def trials(self) -> int:
        """Number of layouts that were timed."""
        return sum(judge.trials for judge in self._judges.values())

    def seconds_alone(self, pool: int) -> float:
        """Return the seconds of a micro-batch in all layers on one GPU at its best rates; none recomputed."""
        job = replace(self.job(self.widths[0]), recompute="none")
        speeds = device_speeds(self.pools.pools[pool].device, job)
        tokens = self.micro_batch_size * job.seq_length
        return tokens * (token_seconds(speeds, job) + attention_seconds(speeds, job, causal=True))

    def job(self, width: int) -> Job:
        """Return the job of one micro-batch with units of `width` tensor-parallel ranks."""
        return self._fleets[width].job

    def placement(self, shape: StageShape) -> tuple[int, str]:
        """Return a key of the placement of experts on a stage of this shape."""
        return placement(self.experts, shape.units, shape.width, is_mixed=len(shape.kinds) > 1)

    def _layer(self, shape: StageShape, timed: bool) -> LayerTimes | None:
        """Return the times of a layer on a stage of this shape; ``None``: the shape is impossible."""
        if timed or is_exact(shape):
            name = shape, self.placement(shape)
            if name not in self.known.layers:
                self.known.layers[name] = self._trial(shape)
            return self.known.layers[name]
        beside = self._without_waiting(shape)
        return None if beside is None else beside.slower(self._waiting(tuple(shape.kinds), shape.width))

    def _without_waiting(self, shape: StageShape) -> LayerTimes | None:
        """Return a layer's times if no pool of the stage waited for another."""
        alone = [self.layer(_only(shape, pool), True) for pool in shape.kinds]
        known = [layer for layer in alone if layer is not None]
        return _side_by_side(known) if len(known) == len(alone) else None

    def _waiting_factor(self, kinds: tuple[int, ...], width: int) -> float:
        """Return the factor by which waiting slows stages of these pools, timed with a few units."""
        pools = self.pools.pools
        most = max(1, _WAITING_UNITS * width // len(kinds))
        counts = tuple(
            self.pools.rounded(pool, min(most, pools[pool].gpus), width) if pool in kinds else 0
            for pool in range(len(pools))
        )
        shape = StageShape(counts, width)
        if any(not counts[pool] for pool in kinds):
            return 1.0
        beside, timed = self._without_waiting(shape), self.layer(shape, True)
        return 1.0 if beside is None or timed is None else timed.seconds / beside.seconds

    def _trial(self, shape: StageShape) -> LayerTimes | None:
        """Return a layer's times by the cost model, in the best of a few groupings; ``None``: impossible."""
        units = self._stage_units(shape)
        if units is None:
            return None
        judge, fleet = self._judges[shape.width], self._fleets[shape.width].subset(units)
        rates = self._rates[shape.width].of(units)
        groupings = _groupings(fleet, rates.local_heads)
        if not groupings:
            return None
        guess = FirstGuess(fleet, rates)

        def timed(grouping: Grouping) -> Trial:
            return judge.try_out(fleet, [guess.layout(grouping, 1)], WINDOW)

        best = _best_grouping(fleet, groupings, timed, rates.local_heads)
        for _ in range(_ROUNDS if len(shape.kinds) > 1 else 0):
            trial = judge.try_out(fleet, [rebalanced(rates, best)], WINDOW)
            if _layer_seconds(trial) >= _layer_seconds(best):
                break
            best = trial
        return self._read(shape, best)

    def _stage_units(self, shape: StageShape) -> list[int] | None:
        """Return the numbers in the fleet of a stage's units; ``None``: the shape is impossible."""
        gpus = set(self.pools.some_gpus(shape))
        of_fleet = enumerate(self._fleets[shape.width].units)
        units = [number for number, unit in of_fleet if gpus.issuperset(unit.gpus[0])]
        return units if len(units) * shape.width == len(gpus) else None

    def _read(self, shape: StageShape, trial: Trial) -> LayerTimes:
        (section,), (stage,) = trial.timing.sections, trial.timing.stages
        pool_of_node = {node: pool for pool in shape.kinds for node in self.pools.pools[pool].nodes}
        nodes = [self.cluster.ranks[gpu].node for gpu in section.placement.gpus[:, 0].tolist()]
        pool = np.array([shape.kinds.index(pool_of_node[node]) for node in nodes])
        (placed,) = trial.timing.experts
        held = Holdings.of_section(section, np.ones(1, dtype=np.int64), stage.flights, placed)
        alone = replace(section.job, model=section.job.model.without_predictions)
        jobs = [replace(alone, recompute=mode) for mode in self.offered]
        memory = [part_memory(job, _ONE_LAYER, held, section.window, 0.0) for job in jobs]
        once = replace(section.job, recompute="none")
        loss = memory[0] if once == jobs[0] else part_memory(once, _ONE_LAYER, held, section.window, 0.0)
        blocks = once.model.mtp_layers * prediction_bytes(once, held.tokens)
        counts = [kind.layers for kind in _ONE_LAYER.of_kinds(alone.model)]
        mean = partial(stage.mean, counts=counts)
        kinds = {id(layer): kind for layer, kind in zip(stage.kinds, section.job.kinds, strict=True)}

        def added(mode: Recompute) -> float:
            return mean(lambda layer: _added(layer, replace(kinds[id(layer)], recompute=mode), section))

        def most(values: Floats) -> Floats:
            largest = np.zeros(len(shape.kinds))
            np.maximum.at(largest, pool, values)
            return largest

        everything = np.ones(len(pool), dtype=bool)
        return LayerTimes(
            forward=mean(lambda layer: float(layer.forward.finish.max())),
            backward=mean(lambda layer: float(layer.backward.finish.max())),
            free_forward=mean(partial(free_network, "forward", everything)),
            free_backward=mean(partial(free_network, "backward", everything)),
            added=np.array([added(mode) for mode in self.offered]),
            logits=float(np.add(*stage.last.passes).max()),
            units=np.bincount(pool).astype(float),
            tokens=most(section.arrays.tokens.astype(float)),
            kept=np.array([most(allocated_bytes(sum_terms(terms, "kept"))) for terms in memory]),
            working=np.array([most(allocated_bytes(sum_terms(terms, "layer"))) for terms in memory]),
            logits_bytes=most(allocated_bytes(sum_terms(loss, "loss") + blocks)),
            border_bytes=most(allocated_bytes(border_bytes(section.job, held.tokens))),
            experts=most(held.experts + np.zeros(len(pool))),
            fp8_copies=most(held.fp8_copies + np.zeros(len(pool))),
            expert_copies=1 if placed is None else len(np.unique(placed.domain)),
            first=FirstTimes.of(stage, once, most),
        )


def _only(shape: StageShape, pool: int) -> StageShape:
    """Return the part of a stage's shape in one pool."""
    return StageShape(tuple(count * (place == pool) for place, count in enumerate(shape.counts)), shape.width)


def _side_by_side(layers: Sequence[LayerTimes]) -> LayerTimes:
    """Return a layer's times on several pools, with tokens in proportion to speed, and none waiting."""
    speeds = np.array([1 / layer.seconds for layer in layers])
    share = speeds / speeds.sum()

    def together(seconds: Sequence[Any]) -> float:
        return float(1 / sum(1 / each for each in seconds)) if min(seconds) else 0.0

    def joined(values: Sequence[Floats]) -> Floats:
        return np.concatenate([own * part for own, part in zip(values, share, strict=True)], axis=-1)

    shared: dict[str, Any] = {
        name: add([getattr(layer, name) for layer in layers])
        for names, add in ((_SHARED_SECONDS, together), (_SHARED_BYTES, joined))
        for name in names
    }
    return LayerTimes(
        **shared,
        # Of the pool whose messages leave least of its time; each pool has its share of the tokens.
        free_forward=float(min(share * [layer.free_forward for layer in layers])),
        free_backward=float(min(share * [layer.free_backward for layer in layers])),
        added=np.array([together(added) for added in zip(*(layer.added for layer in layers), strict=True)]),
        units=np.concatenate([layer.units for layer in layers]),
        fp8_copies=np.concatenate([layer.fp8_copies for layer in layers]),
        expert_copies=min(layer.expert_copies for layer in layers),
        first=FirstTimes(
            together([layer.first.seconds for layer in layers]),
            together([layer.first.again for layer in layers]),
            joined([layer.first.kept for layer in layers]),
        ),
    )


def _best_grouping(
    fleet: Fleet, groupings: Mapping[int, Grouping], timed: Callable[[Grouping], Trial], heads: int
) -> Trial:
    """Return the fastest trial of a few groupings."""
    # Start from groups of a node; go to larger ones as long as that is faster, or else to smaller ones.
    best, found = timed(groupings[0]), 0
    for step in (-1, 1):
        while found + step in groupings:
            trial = timed(groupings[found + step])
            if _layer_seconds(trial) >= _layer_seconds(best):
                break
            best, found = trial, found + step
        if found:
            break
    others = [timed(spread(fleet, size)) for size in _spread_sizes(fleet, best, heads)]
    return min([best, *others], key=_layer_seconds)


def _layer_seconds(trial: Trial) -> float:
    return trial.timing.stages[0].mean(
        lambda layer: float(layer.forward.finish.max() + layer.backward.finish.max())
    )


def _added(layer: Layer, job: Job, section: Section) -> float:
    """Return the seconds that recomputation by the job, of layers of one kind, adds to a layer."""
    if job.again.is_whole:
        return float(layer.forward.finish.max())
    if not job.again:
        return 0.0
    assert layer.again is not None, "core attention is timed again"
    stage, part_sums = section.placement.stage, layer.forward.tensor_parallel / len(job.model.parts)
    rows = computed_rows(job, section.arrays.tokens.astype(float), stage.in_fp8)
    work = sum(work_again(job, stage, rows, part_sums, layer.experts), np.zeros(len(rows)))
    return float(work.max()) + ("core_attn" in job.again) * float(layer.again.finish.max())


def _spread_sizes(fleet: Fleet, best: Trial, heads: int) -> list[int]:
    """Return group sizes that may be faster across nodes: the present one, and one unit for each head."""
    if not fleet.job.model.spans_groups:
        return []
    sizes = {max(len(part.units) for part in best.layouts[0].parts), heads}
    return sorted(size for size in sizes if 1 < size < len(fleet.units)) if len(fleet.sites) > 1 else []


def _groupings(fleet: Fleet, heads: int) -> dict[int, Grouping]:
    """Return groupings from one group of all units down to single units: nodes joined, whole, and cut.

    Each has its place in this order; groups of a node, or the largest groups, have place 0.
    """
    sites, units = fleet.sites, tuple(range(len(fleet.units)))
    if not fleet.job.model.spans_groups:
        return {0: (units,)} if len(units) <= heads else {}
    groupings: list[Grouping] = [(units,)]
    joined = 2 ** max(0, (len(sites) - 1).bit_length() - 1)
    while joined > 1:
        runs = [sites[place : place + joined] for place in range(0, len(sites), joined)]
        groupings.append(tuple(tuple(unit for site in run for unit in site) for run in runs))
        joined //= 2
    groupings.append(sites)
    for parts in (2, 4):
        if all(len(site) % parts == 0 and len(site) > parts for site in sites):
            groupings.append(tuple(site[part::parts] for site in sites for part in range(parts)))
    groupings.append(tuple((unit,) for unit in units))
    named = dict.fromkeys(tuple(sorted(map(tuple, grouping))) for grouping in groupings)
    found = [grouping for grouping in named if max(map(len, grouping)) <= heads]
    start = next((place for place, grouping in enumerate(found) if len(grouping) >= len(sites)), 0)
    return {place - start: grouping for place, grouping in enumerate(found)}
