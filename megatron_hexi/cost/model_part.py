"""The parts of a model that units hold: their layers by kind, and the micro-batches in flight on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Counts, Floats, Ints
from megatron_hexi.mesh import passes_ahead
from megatron_hexi.models.job import Job
from megatron_hexi.models.model import Model
from megatron_hexi.plan.model import Range


@dataclass(frozen=True, eq=False)
class Present:
    """Numbers of weights on each unit's GPUs and in host memory at the peak (`mesh.residence`), [U] each.

    Args:
        weights: number of weights on the device.
        gradients: number of weights whose gradients are on the device.
        state: number of weights whose optimizer state is on the device.
        host_weights: number of weights in host memory.
        host_gradients: number of weights whose gradients are in host memory.
        host_state: number of weights whose optimizer state is in host memory.
        host_masters: number of weights with state in host memory whose model weights stay on the device.
    """

    weights: Floats
    gradients: Floats
    state: Floats
    host_weights: Floats
    host_gradients: Floats
    host_state: Floats
    host_masters: Floats

    def of(self, ranks: Ints) -> Present:
        """Return the numbers by unit from numbers by rank: the largest of each unit's `ranks`, [U, tp]."""
        return Present(**{field.name: getattr(self, field.name)[ranks].max(axis=1) for field in fields(self)})


class KindLayers(NamedTuple):
    """Number of layers of one kind, and number of those that the backward pass computes again."""

    layers: Counts
    again: Counts

    def kept(self, plain: Floats, repeated: Floats) -> Floats:
        """Return the bytes that the layers keep, from those of a plain and of a recomputed layer."""
        return self.again * repeated + (self.layers - self.again) * plain

    def seconds(self, once: Floats | float, repeated: Floats | float) -> Floats | float:
        """Return the seconds of the layers' passes.

        Args:
            once: seconds of a layer's forward and backward pass.
            repeated: seconds of its recomputation.
        """
        return self.layers * once + self.again * repeated


def chunk_ranges[N: (int, Ints)](job: Job, first: N, layers: int) -> tuple[tuple[N, N], ...]:
    """Return the layers of each chunk of a pipeline stage, as Megatron numbers them.

    Args:
        first: number of layers in the stages before.
    """
    chunks = job.virtual_stages
    size = layers // chunks
    firsts = [first // chunks + chunk * job.model.layers // chunks for chunk in range(chunks)]
    return tuple((start, start + size) for start in firsts)


class EndWeights(NamedTuple):
    """Weights outside layers, which a first or a last stage holds.

    Args:
        params: number of them on a rank, in each of `blocks` alike.
        is_trained: whether they have gradients and optimizer state, or adapters that have.
    """

    name: str
    params: int
    in_first: bool
    in_last: bool
    blocks: int = 1
    is_trained: bool = True

    def held(self, is_first: Bools | bool, is_last: Bools | bool) -> Bools | bool:
        """Return whether stages hold them, by their place in the pipeline."""
        return is_first & self.in_first | is_last & self.in_last


def end_weights(job: Job, width: int) -> list[EndWeights]:
    """Return the weights outside layers on one rank of a unit of `width`: of tokens, images and losses.

    A last stage embeds the tokens that follow those it predicts, and has a tied embedding for its output.
    """
    model, predicts = job.model, job.model.mtp_layers > 0
    vocabulary, norm = model.vocab_params(width), model.norm_params(model.hidden_size)
    positions = model.learned_positions * model.hidden_size
    encoder, projectors = (0, 0) if job.images is None else model.encoder_params(width)
    is_trained, are_trained = job.trained_vision
    found = (
        EndWeights("embedding", vocabulary, True, model.shares_embedding),
        EndWeights("encoder", encoder, True, False, is_trained=is_trained),
        EndWeights("projectors", projectors, True, False, is_trained=are_trained),
        EndWeights("positions", positions, True, predicts),
        EndWeights("prediction", model.prediction_params(width), False, predicts, model.mtp_layers),
        EndWeights("norm", norm, False, True),
        EndWeights("output", vocabulary, False, not model.tied_embeddings),
    )
    return [weights for weights in found if weights.params and (weights.in_first or weights.in_last)]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """The part of the model that units have; numbers, or arrays over units, [U].

    Args:
        layers: number of layers, without those of multi-token prediction.
        again: number of these that the backward pass computes again: the first ones.
        is_first: whether the part has the embedding.
        is_last: whether it has the last norm, the output matrix, the loss, and all multi-token prediction.
        ahead: largest number of passes of a chunk whose activations are kept at a time: those that run
            forward before 1F1B begins, and one (`passes_ahead`). With ministages interleaved, the number of
            micro-batches that keep as much (`most_kept`).
        ministages: number of ministages that the layers run in one after the other; 0: in 1F1B.
        rows_on_host: whether rows that entered ministages wait in host memory.
        ranges: first layer, and the one after the last, of each chunk or ministage in the order in which they
            run, as a tuple, or [U, ranges, 2], where empty ranges may come last; ``None``: the layers are a
            mean of all.
        chunks: number of chunks of the layers, of equal length.
        first_ahead: largest number of passes of the first chunk, or of the first of interleaved ministages,
            that are kept at a time by a first stage; ``None``: as many as `ahead`.
    """

    layers: Ints | int
    again: Ints | int
    is_first: Bools | bool
    is_last: Bools | bool
    ahead: Counts
    ministages: Ints | int = 0
    rows_on_host: Bools | bool = False
    ranges: Ints | tuple[Range, ...] | None = None
    chunks: int = 1
    first_ahead: Counts | None = None

    @classmethod
    def of_job(cls, job: Job, stage: Ints | int) -> ModelPart:
        """Return the part of a pipeline stage, or of an array of stages, for a job with equal stages."""
        chunks = job.virtual_stages
        ranges: Any = chunk_ranges(job, stage * job.stage_layers, job.stage_layers)
        return cls(
            layers=job.stage_layers,
            again=job.again.layers(job.stage_layers, chunks),
            is_first=stage == 0,
            is_last=stage == job.pipeline_parallel - 1,
            ahead=passes_ahead(job.pipeline_parallel, stage, chunks) + 1,
            ranges=np.moveaxis(np.array(ranges), (0, 1), (-2, -1)) if np.ndim(stage) else ranges,
            chunks=chunks,
            first_ahead=job.pipeline_parallel * min(chunks, 2),
        )

    def predictions(self, model: Model) -> KindLayers:
        """Return how many layers of multi-token prediction the part has, and how many are computed again.

        The part with the loss has all of them, other parts none. Megatron computes them again if it computes
        all layers of the stage again, but not if only some (--recompute-method block).
        """
        layers = self.is_last * model.mtp_layers
        return KindLayers(layers, layers * (self.again == self.layers))

    def of_kinds(self, model: Model) -> list[KindLayers]:
        """Return the part's layers of each kind of the model; `predictions` are of the last layer's kind."""
        found = self._of_decoder(model)
        last, more = found[model.kind_of_layers[-1]], self.predictions(model)
        found[model.kind_of_layers[-1]] = KindLayers(last.layers + more.layers, last.again + more.again)
        return found

    def _of_decoder(self, model: Model) -> list[KindLayers]:
        """Return the layers of each kind without those of multi-token prediction."""
        if model.is_uniform:
            return [KindLayers(self.layers, self.again)]
        if self.ranges is None:
            shares = [kind.layers / model.layers for kind in model.kinds]
            return [KindLayers(self.layers * share, self.again * share) for share in shares]
        before, (first, stop) = np.array(model.layers_before), self._ends
        again = np.asarray(self.again)[..., None]
        stop_again = np.minimum(stop, first + again // self.chunks)  # as many in each chunk
        counts = ((before[:, last] - before[:, first]).sum(axis=-1) for last in (stop, stop_again))
        return [KindLayers(*both) for both in zip(*counts, strict=True)]

    @property
    def _ends(self) -> tuple[Ints, Ints]:
        """First layer of each of `ranges`, and the layer after its last, [..., ranges] each."""
        ranges = np.asarray(self.ranges)
        return ranges[..., 0], ranges[..., 1]

    def in_ranges(self, model: Model) -> list[Ints]:
        """Return the number of layers of each kind in each of `ranges`, [..., ranges] each.

        Those of multi-token prediction are not among them.
        """
        first, stop = self._ends
        if model.is_uniform:
            return [stop - first]
        return list((before := np.array(model.layers_before))[:, stop] - before[:, first])

    @property
    def borders(self) -> Ints:
        """Number of stages next to the part's stage: 0 to 2."""
        return 2 - np.asarray(self.is_first, dtype=int) - np.asarray(self.is_last, dtype=int)

    def of(self, index: Ints | np.int64) -> ModelPart:
        """Return the part with the entries of its arrays at these indices."""
        arrays = ((name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray))
        found: dict[str, Any] = {name: value[index] for name, value in arrays}
        return replace(self, **found)

    def in_flight(self, micro_batches: Ints) -> Floats:
        """Return the number of micro-batches whose activations are kept at a time, of those of an iteration.

        A pass of one of several chunks counts as a part of a micro-batch.
        """
        passes = np.minimum(self.chunks * micro_batches, self.ahead)
        return np.where(self.ministages, 1, passes / self.chunks)

    def encoded(self, micro_batches: Ints) -> Ints:
        """Return the number of micro-batches whose images' activations a first stage keeps at a time."""
        ahead = self.ahead if self.first_ahead is None else self.first_ahead
        return np.where(self.ministages, 1, np.minimum(micro_batches, ahead))

    def at_once(self, model: Model, weights: Sequence[float]) -> Floats:
        """Return the fraction of activations kept at a time: the largest ministage's; 1 without ministages.

        Layers of multi-token prediction belong to the last ministage, and are added to the largest.

        Args:
            weights: relative bytes that a layer of each kind keeps (`kept_weights`).
        """
        more = self.predictions(model).layers * weights[model.kind_of_layers[-1]]
        layers = np.stack(self.in_ranges(model), axis=-1)
        kept = (layers * np.array(weights)).sum(axis=-1)
        every = kept.sum(axis=-1)
        most = np.where(np.asarray(self.ministages) > 0, kept.max(axis=-1), every)
        return (most + more) / np.maximum(every + more, 1)

    def entered(self, micro_batches: Ints) -> Ints:
        """Return the number of micro-batches whose input rows are kept, added up over all ministages.

        The model's first ministage has no input rows, and its last one uses them as soon as they arrive.
        """
        ends = np.logical_or(self.is_first, self.is_last)
        return micro_batches * np.maximum(self.ministages - ends, 0)

    def run_twice(self, model: Model) -> list[Counts]:
        """Return the number of layers of each kind that run forward twice: in all ministages but the last."""
        if not np.any(self.ministages):
            return [0 for _ in model.kinds]
        layers = self.in_ranges(model)
        in_turn = np.minimum(self.ministages, 1)
        last = np.broadcast_to(np.maximum(self.ministages, 1) - 1, layers[0].shape[:-1])[..., None]
        return [
            in_turn * (held.sum(axis=-1) - self.is_last * np.take_along_axis(held, last, axis=-1)[..., 0])
            for held in layers
        ]
