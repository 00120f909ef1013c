"""Tables of a stage's time by its number of layers, for each shape of stage.

A layer's time does not depend on how many layers its stage has, so one layer that was timed (layer_times.py)
gives the time of all. Memory then decides how many of them must be recomputed: its terms are those of the
cost model, and grow with layers and with micro-batches in flight. So a table has the times of a layout that
exists. Of units of several kinds it only has the slowdown that short memory causes; the domain search finds
their shares, and makes the finalists faster.

Tables of many stages are computed together, since numpy's calls take longer than the numbers of one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats, Ints
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, owned_params, part_params, static_memory
from megatron_hexi.cost.model_part import KindLayers, ModelPart
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import Again, of_layer
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.pools import Pools, StageShape, is_exact
from megatron_hexi.planner.joint.stage_times import FirstTimes, LayerTimes, Table
from megatron_hexi.planner.request import Request

#: The most stages of a pipeline.
DEEPEST = 16
#: Numbers of micro-batches in flight that have a table; a number between two uses the larger one's.
UNDER_WAY = (1, 2, 3, 4, 6, 8, 12, DEEPEST)
#: Index into these of the table for 1 to `DEEPEST` micro-batches in flight.
ROWS = np.searchsorted(UNDER_WAY, np.arange(1, DEEPEST + 1))
#: The largest slowdown by memory that forces tokens from one kind of units to others; beyond it, no fit.
_MOST_STRETCH = 20.0
#: Each kind of units must have memory for this part of its share of the tokens; else the stage does not fit.
_LEAST_ROOM = 0.02
#: Approximate number of entries of the arrays of stages that are computed together: these stay in the cache.
_CHUNK = 2**15


class StageTables:
    """Tables of all stages for one job's micro-batches, each computed when it is first asked for.

    Args:
        pools: the pools of GPUs, with the memory that plans may use.
    """

    def __init__(self, request: Request, timer: LayerTimer, pools: Pools) -> None:
        self.timer, self.pools, self.layers = timer, pools, request.job.model.layers
        self._fixed = request.job.recompute if "recompute" in request.fixed else None
        known = pools.usable_gib, self._fixed
        self._known = timer.known.tables.setdefault(known, {})
        #: Pipelines that a search made of these tables (`PipelineSearch.layered`).
        self.pipes = timer.known.pipes.setdefault(known, {})

    def table(
        self, shape: StageShape, under_way: int, is_first: bool, is_last: bool, shards: int, timed: bool
    ) -> Table | None:
        """Return the table of a stage at its position in the pipeline; ``None`` for an impossible stage.

        Args:
            under_way: number of micro-batches whose activations it keeps at a time.
            timed: whether its layer is timed; else that of a stage on several pools is an estimate.
        """
        tables = self.tables(shape, is_last, shards, timed, deep=not is_last or under_way > 1)
        if tables is None:
            return None
        place = int(is_first), ROWS[under_way - 1]
        return Table(tables.seconds[place], tables.modes[place], tables.offered)

    def tables(
        self, shape: StageShape, is_last: bool, shards: int, timed: bool, *, deep: bool
    ) -> Table | None:
        """Return the tables of a stage at every position, [2, F, L]; for the arguments see `table`.

        The axes are whether it is the first, the micro-batches in flight (`UNDER_WAY` if `deep`, else one, as
        in a last stage of 1F1B), and the number of layers.
        """
        name = shape, self.placed(shape, timed), is_last, shards, timed, deep
        if name not in self._known:
            self.prepare([shape], is_last, shards, timed, deep=deep)
        return self._known[name]

    def prepare(
        self, shapes: Iterable[StageShape], is_last: bool, shards: int, timed: bool, *, deep: bool
    ) -> None:
        """Compute the tables of stages that are not known yet; arguments as in `tables`."""
        alike: dict[tuple[int, int], dict[tuple[object, ...], tuple[StageShape, LayerTimes]]] = {}
        for shape in shapes:
            name = shape, self.placed(shape, timed), is_last, shards, timed, deep
            if name in self._known:
                continue
            layer = self.timer.layer(shape, timed)
            if layer is None:
                self._known[name] = None
            else:
                alike.setdefault((shape.width, len(layer.units)), {})[name] = shape, layer
        for (width, kinds), stages in alike.items():
            size = max(1, _CHUNK // (kinds * len(_positions(deep)) * self.layers))
            for some in itertools.batched(stages, size):
                made = self._tables(
                    [stages[name] for name in some], self.timer.job(width), is_last, shards, deep
                )
                self._known.update(zip(some, made, strict=True))

    def placed(self, shape: StageShape, timed: bool) -> object:
        """Return a key of the placement of experts by which a stage's layer is timed or estimated."""
        # An estimate of several pools is made from a smaller stage, on which experts may be placed otherwise.
        is_timed = timed or is_exact(shape)
        return self.timer.placement(shape) if is_timed else self.timer.experts

    def _tables(
        self,
        stages: Sequence[tuple[StageShape, LayerTimes]],
        job: Job,
        is_last: bool,
        shards: int,
        deep: bool,
    ) -> Iterator[Table]:
        """Yield `tables` of stages with one tensor-parallel size and on as many kinds of GPU each.

        Shape letters: S stages, P positions, K kinds of GPU, L numbers of layers.
        """
        layer = _Layers([layer for _, layer in stages])
        count = np.arange(1, self.layers + 1)
        first, under_way = np.array(_positions(deep)).T[:, :, None, None]
        part = ModelPart(layers=count, again=count, is_first=first, is_last=is_last, ahead=1)
        # Bytes left for activations, [S, P, K, L].
        ends = is_last * layer.logits_bytes + part.borders * layer.border_bytes
        memory = np.array([[self.pools.usable_gib[kind] for kind in shape.kinds] for shape, _ in stages])
        room = GIB * memory[:, None, :, None] - RESERVE_BYTES - ends
        units = np.array([shape.units for shape, _ in stages])[:, None, None, None]
        copies = layer.expert_copies * shards
        room = room - static_bytes(job, part, layer.experts, layer.fp8_copies, units * shards, copies)
        best = np.full((len(stages), len(first), self.layers), np.inf)
        modes, offered = np.zeros(best.shape, dtype=np.int64), self.timer.offered
        # Layers of multi-token prediction stand for layers of the mean.
        predictions = is_last * job.model.mtp_layers
        ahead = ahead_freed = np.zeros(())
        if job.images is not None:
            _, ahead = layer.first.taken(job, first, count, 0 * count, under_way)
            ahead_freed = first * (layer.first.kept[0] - layer.first.kept[1])
        for mode, again in self._choices(layer, room, count + predictions, under_way, ahead, ahead_freed):
            again = np.minimum(again, count)
            held = KindLayers(count + predictions, again + predictions * np.equal(again, count))
            on_kinds = KindLayers(held.layers, np.expand_dims(held.again, -2))
            kept = on_kinds.kept(layer.kept[0], layer.kept[mode])
            taken = under_way * kept + layer.working[mode]
            seconds = held.seconds(layer.seconds, layer.added[mode]) + is_last * layer.logits
            if job.images is not None:
                own_job = replace(job, recompute=offered[mode])
                more, kept = layer.first.taken(own_job, first, count, again, under_way)
                seconds, taken = seconds + more, taken + kept
            if np.all(best <= seconds):
                continue  # whatever room there is
            seconds = seconds * _stretch(layer.weight, room, taken)
            partly = np.where((again < count) & (again > 0), len(offered) + again, mode)
            better = seconds < best
            best, modes = np.where(better, seconds, best), np.where(better, partly, modes)
        shape = len(stages), 2, -1, self.layers
        if job.first_layers > 1:  # a first stage takes as long with fewer, so that it gets no fewer
            few = best[..., job.first_layers - 1 : job.first_layers]
            best = np.where(first[..., 0] & (count < job.first_layers), few, best)
        longest = np.maximum.accumulate(best, axis=-1).reshape(shape)
        yield from (Table(*own, offered) for own in zip(longest, modes.reshape(shape), strict=True))

    def _choices(
        self,
        layer: _Layers,
        room: Floats,
        count: Ints,
        under_way: Ints,
        ahead: Floats,
        ahead_freed: Floats,
    ) -> Iterator[tuple[int, Ints]]:
        """Yield modes of recomputation (indices), and how many layers each recomputes, [L] or [S, P, L].

        Args:
            count: numbers of layers, with those of multi-token prediction, [L].
            ahead: bytes that a first stage keeps of what is ahead of its layers, of all micro-batches.
            ahead_freed: bytes that each layer frees of a micro-batch's that is computed again.
        """
        layers = np.arange(1, self.layers + 1)
        if self._fixed is not None:
            again = np.array([Again.of(self._fixed).layers(number) for number in layers.tolist()])
            yield self.timer.offered.index(of_layer(self._fixed)), again
            return
        full = len(self.timer.offered) - 1
        yield 0, 0 * layers
        for mode in range(1, full + 1):
            yield mode, layers
        # As many whole layers as free the memory that is missing; the layer at work then is one of them.
        freed = under_way * np.maximum(layer.kept[0] - layer.kept[full] + ahead_freed, 1e-9)
        kept = under_way * (count * layer.kept[0]) + ahead
        missing = kept + layer.working[full] - room
        needed = np.ceil(np.maximum(missing, 0.0) / freed).max(axis=2)
        yield full, np.clip(needed, 1, count).astype(np.int64)


@cache
def _positions(deep: bool) -> list[tuple[bool, int]]:
    """Return whether a stage is the first, and its micro-batches in flight, for each of its tables."""
    under_way = UNDER_WAY if deep else UNDER_WAY[:1]
    return [(is_first, number) for is_first in (False, True) for number in under_way]


class _Layers:
    """Layers of S stages on K kinds of GPU each as arrays, [S, 1, K, 1] and [S, 1, 1]."""

    def __init__(self, layers: Sequence[LayerTimes]) -> None:
        def kinds(name: str) -> Floats:
            return np.array([getattr(layer, name) for layer in layers])[:, None, :, None]

        def modes(values: Iterable[Floats]) -> Floats:
            return np.array(list(values)).swapaxes(0, 1)[:, :, None, :, None]

        def whole(values: Iterable[Counts]) -> Floats:
            return np.array(list(values))[:, None, None]

        self.logits_bytes, self.border_bytes = kinds("logits_bytes"), kinds("border_bytes")
        self.experts, self.fp8_copies = kinds("experts"), kinds("fp8_copies")
        self.kept = modes(layer.kept for layer in layers)
        self.working = modes(layer.working for layer in layers)
        self.expert_copies = whole(layer.expert_copies for layer in layers)[..., None]
        self.seconds = whole(layer.seconds for layer in layers)
        self.logits = whole(layer.logits for layer in layers)
        self.first = FirstTimes(
            whole(layer.first.seconds for layer in layers),
            whole(layer.first.again for layer in layers),
            modes([layer.first.kept for layer in layers]),
        )
        self.added = [whole(added) for added in zip(*(layer.added for layer in layers), strict=True)]
        tokens = kinds("units") * kinds("tokens")
        #: Part of the tokens that each kind's units have together.
        self.weight = tokens / tokens.sum(axis=2, keepdims=True)


def static_bytes(
    job: Job, part: ModelPart, experts: Floats, fp8_copies: Floats, owners: Counts, copies: Counts
) -> Floats:
    """Return the bytes beside the reserve that a GPU of each kind always holds, [..., kinds, L].

    Args:
        part: parts of 1 to L layers.
        experts: number of routed experts on a GPU of each kind, [..., kinds, 1].
        fp8_copies: bytes of fp8 copies of a weight of matrices on a GPU of each kind; 0: in bf16.
        owners: number of units that share the state of weights that all hold.
        copies: number of units that share the state of an expert.
    """
    params, trained = (part_params(job, part, trained=only) for only in (False, True))
    routed = part_params(job, part, experts) - params
    owned = owned_params(job, trained, owners) + owned_params(job, routed, copies)
    terms = static_memory(job, part, params + routed, trained + routed, owned, fp8_copies, experts)
    total: Floats = sum(terms.values(), np.zeros(()))
    return total


def _stretch(weight: Floats, room: Floats, taken: Floats) -> Floats:
    """Return the slowdown of stages whose units lack memory for their share of tokens, [S, P, L].

    Units get x times their share by speed, or what their memory holds if that is less, with the least x that
    places all tokens. Bytes are taken to be in proportion to tokens. Infinity stands for stages that do not
    fit.

    Args:
        weight: part of the tokens that each kind's units have together, [S, 1, K, 1].
        room: bytes for activations on each kind's units, [S, P, K, L].
        taken: bytes of activations if all units have their share of tokens, [S, P, K, L].
    """
    cap = np.maximum(room, 0.0) / taken
    if weight.shape[2] == 1:
        return np.where(cap[:, :, 0] >= 1, 1.0, np.inf)
    least, held = cap.min(axis=2), (weight * cap).sum(axis=2)
    # The tokens that full kinds cannot hold are left for the others.
    factor = np.ones(least.shape)
    if not (least >= 1).all():
        for _ in range(weight.shape[2] - 1):
            among = factor[:, :, None]
            short = (weight * np.minimum(cap, among)).sum(axis=2)
            free = (weight * (cap > among)).sum(axis=2)
            factor = factor + np.maximum(0.0, 1 - short) / np.maximum(free, 1e-9)
        factor = np.where(least >= 1, 1.0, factor)
    return np.where((held >= 1) & (least >= _LEAST_ROOM) & (factor < _MOST_STRETCH), factor, np.inf)
