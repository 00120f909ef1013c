"""Tables of a stage's time by its number of layers, for each shape of stage.

A layer's time does not depend on how many layers its stage has, so one layer that was timed (layer_times.py)
gives the time of all. Memory then decides how many of them must be recomputed: its terms are those of the
cost model, and grow with layers and with micro-batches in flight. So a table has the times of a layout that
exists. Of units of several kinds it only has the slowdown that short memory causes; the domain search finds
their shares, and makes the finalists faster.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, owned_params, part_params, static_memory
from megatron_hexi.cost.model_part import KindLayers, ModelPart
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.models.job import layers_again, recompute_mode
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.pools import Pools, StageShape, is_exact
from megatron_hexi.planner.joint.stage_times import LayerTimes, Table
from megatron_hexi.planner.request import Request

#: The most stages of a pipeline.
DEEPEST = 16
#: Numbers of micro-batches in flight that have a table; a number between two uses the larger one's.
UNDER_WAY = (1, 2, 3, 4, 6, 8, 12, DEEPEST)
#: The largest slowdown by memory that forces tokens from one kind of units to others; beyond it, no fit.
_MOST_STRETCH = 20.0
#: Each kind of units must have memory for this part of its share of the tokens; else the stage does not fit.
_LEAST_ROOM = 0.02


class StageTables:
    """Tables of all stages for one job's micro-batches, each computed when it is first asked for.

    Args:
        pools: the pools of GPUs, with the memory that plans may use.
    """

    def __init__(self, request: Request, timer: LayerTimer, pools: Pools) -> None:
        self.timer, self.pools, self.layers = timer, pools, request.job.model.layers
        self._fixed = request.job.recompute if "recompute" in request.fixed else None
        self._known = timer.known.tables.setdefault(pools.usable_gib, {})
        #: Pipelines that a search made of these tables (`PipelineSearch.layered`).
        self.pipes = timer.known.pipes.setdefault((pools.usable_gib, self._fixed), {})

    def table(
        self, shape: StageShape, under_way: int, is_first: bool, is_last: bool, shards: int, timed: bool
    ) -> Table | None:
        """Return the table of a stage at its position in the pipeline; ``None`` for an impossible stage.

        Args:
            under_way: number of micro-batches whose activations it keeps at a time.
            timed: whether its layer is timed; else that of a stage on several pools is an estimate.
        """
        name = shape, self.placed(shape, timed), is_first, is_last, shards, timed, self._fixed
        if name not in self._known:
            self._known[name] = self._tables(shape, is_first, is_last, shards, timed)
        stack = self._known[name]
        return None if stack is None else stack[bisect.bisect_left(UNDER_WAY, under_way)]

    def placed(self, shape: StageShape, timed: bool) -> object:
        """Return a key of the placement of experts by which a stage's layer is timed or estimated."""
        # An estimate of several pools is made from a smaller stage, on which experts may be placed otherwise.
        is_timed = timed or is_exact(shape)
        return self.timer.placement(shape) if is_timed else self.timer.experts

    def _tables(
        self, shape: StageShape, is_first: bool, is_last: bool, shards: int, timed: bool
    ) -> list[Table] | None:
        """Return the table for each of `UNDER_WAY`; ``None``: the stage is impossible."""
        layer = self.timer.layer(shape, timed)
        if layer is None:
            return None
        count, under_way = np.arange(1, self.layers + 1), np.array(UNDER_WAY)[:, None]
        job = self.timer.job(shape.width)
        part = ModelPart(layers=count, again=count, is_first=is_first, is_last=is_last, ahead=1)
        # Bytes left for activations.
        ends = is_last * layer.logits_bytes + part.borders * layer.border_bytes
        usable = GIB * np.array([self.pools.pools[kind].device.usable_gib for kind in shape.kinds])
        room = (usable - RESERVE_BYTES - ends)[:, None, None]
        copies = layer.expert_copies * shards
        room = room - static_bytes(job, part, layer, shape.units * shards, copies)
        best = np.full((len(under_way), len(count)), np.inf)
        modes = np.zeros(best.shape, dtype=np.int64)
        # Layers of multi-token prediction stand for layers of the mean.
        predictions = is_last * job.model.mtp_layers
        for mode, again in self._choices(layer, room, count + predictions, under_way):
            again = np.minimum(again, count)
            held = KindLayers(count + predictions, again + predictions * np.equal(again, count))
            kept = held.kept(layer.kept[0][:, None, None], layer.kept[mode][:, None, None])
            taken = under_way * kept + layer.working[mode][:, None, None]
            seconds = held.seconds(layer.seconds, layer.added[mode]) + is_last * layer.logits
            seconds = seconds * _stretch(layer, room, taken)
            partly = np.where((again < count) & (again > 0), len(RECOMPUTES) + again, mode)
            better = seconds < best
            best, modes = np.where(better, seconds, best), np.where(better, partly, modes)
        return [Table(*rows) for rows in zip(np.maximum.accumulate(best, axis=1), modes, strict=True)]

    def _choices(
        self, layer: LayerTimes, room: Floats, count: Ints, under_way: Ints
    ) -> Iterator[tuple[int, Ints]]:
        """Yield modes of recomputation (indices), and how many layers each recomputes, [L] or [F, L].

        L are the numbers of layers of a stage, F those of micro-batches in flight.
        """
        if self._fixed is not None:
            again = [layers_again(layers, self._fixed) for layers in count.tolist()]
            yield RECOMPUTES.index(recompute_mode(self._fixed)), np.array(again)
            return
        yield 0, 0 * count
        yield 1, count
        yield 2, count
        # As many whole layers as free the memory that is missing; the layer at work then is one of them.
        freed = under_way * np.maximum(layer.kept[0] - layer.kept[2], 1e-9)[:, None, None]
        kept = count * under_way * layer.kept[0][:, None, None]
        missing = kept + layer.working[2][:, None, None] - room
        needed = np.ceil(np.maximum(missing, 0.0) / freed).max(axis=0)
        yield 2, np.clip(needed, 1, count).astype(np.int64)


def static_bytes(job: Job, part: ModelPart, layer: LayerTimes, owners: int, copies: int) -> Floats:
    """Return the bytes beside the reserve that a GPU of each pool always holds, [pools, 1, L].

    Args:
        part: parts of 1 to L layers.
        layer: a layer of the stage, which says how many experts a GPU of each pool has, and its precision.
        owners: number of units that share the state of weights that all hold.
        copies: number of units that share the state of an expert.
    """
    params = part_params(job, part)
    experts, low = layer.experts[:, None, None], layer.fp8_copies[:, None, None]
    weights = part_params(job, part, experts)
    owned = owned_params(job, params, owners) + owned_params(job, weights - params, copies)
    terms = static_memory(job, part, weights, weights, owned, low, experts)
    total: Floats = sum(terms.values(), np.zeros(()))
    return total


def _stretch(layer: LayerTimes, room: Floats, taken: Floats) -> Floats:
    """Return the slowdown of a stage whose units lack memory for their share of tokens; inf: no fit.

    Units get x times their share by speed, or what their memory holds if that is less, with the least x that
    places all tokens. Bytes are taken to be in proportion to tokens.

    Args:
        room: bytes for activations on each pool's units, [pools, ...].
        taken: bytes of activations if all units have their share of tokens, [pools, ...].
    """
    cap = np.maximum(room, 0.0) / taken
    if len(layer.units) == 1:
        return np.where(cap[0] >= 1, 1.0, np.inf)
    weight = layer.units * layer.tokens / (layer.units @ layer.tokens)
    least, held = cap.min(axis=0), np.tensordot(weight, cap, 1)
    # The tokens that full kinds cannot hold are left for the others.
    factor = np.ones(least.shape)
    if not (least >= 1).all():
        for _ in range(len(weight) - 1):
            short = np.tensordot(weight, np.minimum(cap, factor), 1)
            free = np.tensordot(weight, (cap > factor).astype(float), 1)
            factor = factor + np.maximum(0.0, 1 - short) / np.maximum(free, 1e-9)
    return np.where((held >= 1) & (least >= _LEAST_ROOM) & (factor < _MOST_STRETCH), factor, np.inf)
