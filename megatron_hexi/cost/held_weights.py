"""Weights that each rank holds, and the sets of ranks that hold the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple
from functools import lru_cache
from typing import NamedTuple

from megatron_hexi.cost.model_part import end_weights
from megatron_hexi.mesh import Box, Bucket, Mesh, cell_size, cut_pieces, make_buckets
from megatron_hexi.mesh.experts import job_experts
from megatron_hexi.models.job import Job
from megatron_hexi.models.model import Model
from megatron_hexi.plan.units import HeldExperts, Unit


class _Held(NamedTuple):
    """A weight on one rank, or the same weight of several layers, one row a layer.

    Args:
        key: name of the weight.
        rows: range of its rows among those of all layers; (0, 1) for a weight outside layers.
        of: number of rows of all layers.
        depth: place of the weight in the forward pass; lower is earlier.
        ministage: number of the only ministage that uses it; ``None``: several do, or there are none.
    """

    key: str
    rows: tuple[int, int]
    of: int
    depth: int
    ministage: int | None


class HeldWeights:
    """The trained weights that each rank holds, as boxes: layers, vocabulary matrices and norms.

    Training has finer boxes; here one box stands for all weights of a layer, which a rank holds alike. A box
    is cut in as many chunks as all tensor-parallel sizes divide. Norms, which every rank of a unit has whole,
    are counted with the weights that are cut.
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self._job, self._mesh = job, mesh
        self.width = [unit.width for unit in mesh.units]
        self._chunks = math.lcm(*self.width)
        #: Number of weights for each element of a rank's boxes, by key and tensor-parallel size.
        self.density: dict[tuple[str, int], float] = {}
        self._elements: dict[str, int] = {}
        widest = max(self.width)
        self._experts = {
            rank: held
            for experts in job.model.routed
            for rank, held in job_experts(mesh.plan, experts.count).items()
        }
        slices = math.lcm(*(held.parts for _, held in self._experts.values()))
        for kind, model in enumerate(job.model.kinds):
            for routed in model.routed:
                key, weights = _experts_key(kind), routed.expert_params(model, 1)
                # An expert's weights, in as many parts as all slices divide.
                self._elements[key] = -(-weights // slices) * slices
                for width in set(self.width):
                    self.density[key, width] = weights / self._elements[key]
        layers = map(_layers_key, range(len(job.model.kinds)))
        for key in (*layers, *(one.name for one in end_weights(job, widest))):
            self._elements[key] = max(1, self._params(key, widest) * widest // self._chunks)
            for width in set(self.width):
                chunks = self._chunks // width
                self.density[key, width] = self._params(key, width) / (chunks * self._elements[key])

    def buckets(self) -> tuple[tuple[Bucket, float], ...]:
        """Return the buckets in the order of their reduction, each with the least fraction a holder owns."""
        # Many ranks of a stage hold the same part of each box.
        found: dict[tuple[object, ...], tuple[Box, ...]] = {}
        boxes, state = [], []
        for rank, unit in enumerate(self._mesh.units):
            _, experts = self._experts.get(rank, (None, None))
            tp_rank = unit.ranks.index(rank)
            name = unit.replica, unit.stage, tp_rank, unit.width, experts and astuple(experts)[1:]
            if name not in found:
                boxes_of = [self._box(unit, tp_rank, held) for held in self._held(unit)]
                if experts is not None:
                    boxes_of += self._expert_boxes(unit, experts)
                found[name] = tuple(boxes_of)
            boxes.append(found[name])
            state.append(unit.state)
        return _buckets(tuple(boxes), tuple(state))

    def size(self, bucket: Bucket) -> float:
        """Return the number of weights of a bucket on a holder; of each piece, the most on any holder."""
        widths = {self.width[rank] for rank in bucket.holders}
        return sum(
            piece.size * max(self.density[piece.key, width] for width in widths) for piece in bucket.pieces
        )

    def of(self, bucket: Bucket) -> Iterator[tuple[int, float, float]]:
        """Return for each holder its rank, its weights of a bucket, and its weights whose state it owns."""
        whole = {
            width: sum(piece.size * self.density[piece.key, width] for piece in bucket.pieces)
            for width in {self.width[rank] for rank in bucket.holders}
        }
        own = dict.fromkeys(bucket.holders, 0.0)
        for slab in bucket.slabs:
            own[slab.owner] += cell_size(slab.cell) * self.density[slab.key, self.width[slab.owner]]
        return ((rank, whole[self.width[rank]], own[rank]) for rank in bucket.holders)

    def _params(self, key: str, width: int) -> int:
        """Return the weights of a key on one rank of a unit of `width`; of a kind of layers, in one layer."""
        model = self._job.model
        layers = {_layers_key(number): kind.layer_params(width) for number, kind in enumerate(model.kinds)}
        return (layers | {one.name: one.params for one in end_weights(self._job, width)})[key]

    def _held(self, unit: Unit) -> Iterator[_Held]:
        model = self._job.model
        assert unit.layers is not None
        first, last = (0, len(unit.ministages or ()) - 1) if unit.in_turn else (None, None)
        for number, layers in enumerate(unit.ministages or (unit.layers,)):
            for kind, rows, of in _layer_boxes(model, layers):
                yield _Held(_layers_key(kind), rows, of, 1 + layers[0], None if first is None else number)
        for one in end_weights(self._job, unit.width):
            ahead, behind = unit.stage == 0 and one.in_first, unit.is_last and one.in_last
            if one.is_trained and (ahead or behind):
                ministage = None if ahead and behind else first if ahead else last
                depth = 0 if ahead else 1 + model.layers
                yield _Held(one.name, (0, one.blocks), one.blocks, depth, ministage)

    def _expert_boxes(self, unit: Unit, experts: HeldExperts) -> Iterator[Box]:
        """Yield the boxes of a rank's experts: a part of the elements of each, in each layer with experts."""
        model = self._job.model
        assert unit.layers is not None
        for number, layers in enumerate(unit.ministages or (unit.layers,)):
            ministage = (unit.replica, unit.stage, number) if unit.in_turn else None
            for kind, rows, of in _layer_boxes(model, layers):
                total = model.kinds[kind].experts
                if total is None or not experts.count:
                    continue
                key = _experts_key(kind)
                elements = self._elements[key]
                part = elements // experts.parts
                cell = (experts.part * part, (experts.part + 1) * part), rows, experts.experts
                yield Box(key, cell, (elements, of, total.count), 1 + layers[0], ministage)

    def _box(self, unit: Unit, tp_rank: int, held: _Held) -> Box:
        """Return the box of a weight; its elements are the first axis, so that shares are cut along them."""
        elements, chunks = self._elements[held.key], self._chunks // unit.width
        first = tp_rank * chunks
        cell = (0, elements), held.rows, (first, first + chunks)
        ministage = None if held.ministage is None else (unit.replica, unit.stage, held.ministage)
        return Box(held.key, cell, (elements, held.of, self._chunks), held.depth, ministage)


def _layers_key(kind: int) -> str:
    return f"layers.{kind}" if kind else "layers"


def _experts_key(kind: int) -> str:
    return f"experts.{kind}"


def _layer_boxes(model: Model, layers: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yield for each kind of these layers: the kind's number, the range of its rows, and its rows in all.

    Layers of multi-token prediction are further rows of the last layer's kind, and come with that layer.
    """
    for kind, before in enumerate(model.layers_before):
        more = model.mtp_layers if kind == model.kind_of_layers[-1] else 0
        first, stop = before[layers[0]], before[layers[1]] + more * (layers[1] == model.layers)
        if first < stop:
            yield kind, (first, stop), before[-1] + more


@lru_cache(maxsize=4)
def _buckets(boxes: tuple[tuple[Box, ...], ...], state: tuple[int, ...]) -> tuple[tuple[Bucket, float], ...]:
    """Return the buckets of the ranks' boxes and shares of state; plans that differ in offload share them."""
    found = make_buckets(cut_pieces(boxes), dict(enumerate(state)), None)
    return tuple((bucket, _least_share(bucket)) for bucket in found)


def _least_share(bucket: Bucket) -> float:
    """Return the smallest part of a bucket that a holder owns, from 0 to 1."""
    owned = dict.fromkeys(bucket.holders, 0)
    for slab in bucket.slabs:
        owned[slab.owner] += slab.stop - slab.start
    return min(owned.values()) / bucket.size
