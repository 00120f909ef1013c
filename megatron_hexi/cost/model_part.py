"""The parts of a model that units hold: their layers by kind, and the micro-batches in flight on them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Counts, Floats, Ints
from megatron_hexi.cost.job import Job, layers_again
from megatron_hexi.cost.model import Model
from megatron_hexi.cost.pipeline import passes_ahead


@dataclass(frozen=True, eq=False)
class Present:
    """Numbers of weights on each unit's GPUs and in host memory at the peak (`mesh.residence`), [U] each.

    Args:
        weights: on the device.
        gradients: whose gradients are.
        state: whose optimizer's state is.
        host_weights: in host memory.
        host_gradients: whose gradients are.
        host_state: whose optimizer's state is.
        host_masters: those of them that the host has as fp32 weights only, and not as the model's too.
    """

    weights: Floats
    gradients: Floats
    state: Floats
    host_weights: Floats
    host_gradients: Floats
    host_state: Floats
    host_masters: Floats

    def of(self, ranks: Ints) -> Present:
        """The numbers of some units, from numbers by rank: the largest of each unit's ranks, [U, tp]."""
        return Present(**{field.name: getattr(self, field.name)[ranks].max(axis=1) for field in fields(self)})


class KindLayers(NamedTuple):
    """Layers of one kind: how many, and how many of them the backward pass computes again."""

    layers: Counts
    again: Counts

    def kept(self, plain: Floats, repeated: Floats) -> Floats:
        """Bytes that the layers keep of a micro-batch.

        Args:
            plain: of a layer that is not computed again.
            repeated: of one that is.
        """
        return self.again * repeated + (self.layers - self.again) * plain

    def seconds(self, once: Floats | float, repeated: Floats | float) -> Floats | float:
        """Seconds of the layers' passes.

        Args:
            once: a layer's forward and backward pass.
            repeated: what its recomputation takes.
        """
        return self.layers * once + self.again * repeated


@dataclass(frozen=True, eq=False)
class ModelPart:
    """The part of the model that units have; numbers, or arrays over units, [U].

    Args:
        layers: how many, without those of multi-token prediction.
        again: how many of them the backward pass computes again: the first ones.
        is_first: whether with the embedding.
        is_last: whether with the last norm, the output matrix, the loss, and all multi-token prediction.
        ahead: passes of a chunk whose activations are kept at a time, at most: those that run forward before
            the first backward pass, and one (`passes_ahead`).
        ministages: in how many parts they run; 0: whole, in 1F1B.
        rows_on_host: whether rows that entered ministages wait in host memory.
        first_layer: the number of the first of the layers in the model; ``None``: they are a mean of all.
        chunks: parts of the layers that Megatron's interleaved schedule runs in turn: each an equal number,
            as far from the one before as the model has layers for a chunk of all stages.
    """

    layers: Ints | int
    again: Ints | int
    is_first: Bools | bool
    is_last: Bools | bool
    ahead: Ints | int
    ministages: Ints | int = 0
    rows_on_host: Bools | bool = False
    first_layer: Ints | int | None = None
    chunks: int = 1

    @classmethod
    def of_job(cls, job: Job, stage: Ints | int) -> ModelPart:
        """The part of a pipeline stage, or of several, of a job whose stages are alike."""
        chunks = job.virtual_stages
        return cls(
            layers=job.stage_layers,
            again=layers_again(job.stage_layers, job.recompute, chunks),
            is_first=stage == 0,
            is_last=stage == job.pipeline_parallel - 1,
            ahead=passes_ahead(job.pipeline_parallel, stage, chunks) + 1,
            first_layer=stage * (job.stage_layers // chunks),
            chunks=chunks,
        )

    def predictions(self, model: Model) -> KindLayers:
        """Return how many layers of multi-token prediction the part has, and how many are computed again.

        The part with the loss has all of them, other parts none. Megatron computes them again if it does so
        with all layers of the stage, and not if with some only (--recompute-method block).
        """
        layers = self.is_last * model.mtp_layers
        return KindLayers(layers, layers * np.equal(self.again, self.layers))

    def copies_embedding(self, model: Model) -> Ints | int:
        """1 where the part has the embedding beside another stage's: for multi-token prediction."""
        return self.is_last * (1 - self.is_first) * min(model.mtp_layers, 1)

    def of_kinds(self, model: Model) -> list[KindLayers]:
        """The layers of each of the model's kinds that the part has; the last layer's with `predictions`."""
        found = self._of_decoder(model)
        if model.mtp_layers:
            last, more = found[model.kind_of_layers[-1]], self.predictions(model)
            both = KindLayers(last.layers + more.layers, last.again + more.again)
            found[model.kind_of_layers[-1]] = both
        return found

    def _of_decoder(self, model: Model) -> list[KindLayers]:
        """The layers of each kind without those of multi-token prediction."""
        if model.is_uniform:
            return [KindLayers(self.layers, self.again)]
        if self.first_layer is None:
            shares = [kind.layers / model.layers for kind in model.kinds]
            return [KindLayers(self.layers * share, self.again * share) for share in shares]
        before, chunks = np.array(model.layers_before), self.chunks
        firsts = [self.first_layer + chunk * model.layers // chunks for chunk in range(chunks)]
        counts = (
            sum(before[:, first + count // chunks] - before[:, first] for first in firsts)
            for count in (self.layers, self.again)
        )
        return [KindLayers(*both) for both in zip(*counts, strict=True)]

    @property
    def borders(self) -> Ints:
        """Number of neighbouring stages."""
        return 2 - np.asarray(self.is_first, dtype=int) - np.asarray(self.is_last, dtype=int)

    def of(self, index: Ints | np.int64) -> ModelPart:
        """The numbers of some of what this one's arrays are over."""
        arrays = ((name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray))
        found: dict[str, Any] = {name: value[index] for name, value in arrays}
        return replace(self, **found)

    def in_flight(self, micro_batches: Ints) -> Floats:
        """Micro-batches whose activations are kept at a time, of so many; of those of chunks their part."""
        passes = np.minimum(self.chunks * micro_batches, self.ahead)
        return np.where(self.ministages, 1, passes / self.chunks)

    def at_once(self, model: Model) -> Floats:
        """The part of the layers whose activations are kept at a time: of the largest ministage.

        Layers of multi-token prediction belong to the last one.
        """
        count, more = np.maximum(self.ministages, 1), self.predictions(model).layers
        return (-(-self.layers // count) + more) / np.maximum(self.layers + more, 1)

    def entered(self, micro_batches: Ints) -> Ints:
        """Micro-batches whose rows wait after they entered a ministage, over all ministages.

        Nothing enters the first of the model, and what enters the last is used at once.
        """
        ends = np.logical_or(self.is_first, self.is_last)
        return micro_batches * np.maximum(self.ministages - ends, 0)

    def run_twice(self, model: Model) -> list[Counts]:
        """Layers of each kind that run forward once more: of all ministages but that of the loss.

        Which ministages have which kinds does not matter: each runs as many as it has twice.
        """
        last = self.is_last * (self.layers // np.maximum(self.ministages, 1))
        twice = (self.layers - last) * np.minimum(self.ministages, 1)
        if model.is_uniform:
            return [twice]
        return [twice * (held.layers / np.maximum(self.layers, 1)) for held in self._of_decoder(model)]
