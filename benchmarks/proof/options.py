"""Options of the bound: the positions of a GPU in a layout, and the most work it can do there.

An option is a kind of GPU, a tensor-parallel size t, a range of layers l of L, whether the stage is the last
of its replica, and a range of sequences w that the replica takes, as m micro-batches of B. The unit of a GPU
has r = B x tokens rows of a micro-batch. Its work is counted in whole models' sequences of token work (x) and
of attention (z), by mode of recomputation: x = m (l / L) r / (S t) for each of its GPUs.

A stage in ministages is an option of its own, by how many there are: with n of them the last stage of a
replica runs all but an n-th of its layers forward twice, any other stage all of them. Whole on the device are
weights, gradients and what is kept of one micro-batch of the largest ministage, of an n-th of the layers at
least. The rest may be on other GPUs, or in host memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from megatron_hexi.cluster import Curve, Node, PassCurves
from megatron_hexi.cost import attention_seconds
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    device_speeds,
    optimizer_seconds,
    output_products,
    rates,
)
from megatron_hexi.cost.layer_bytes import Flights, logit_bytes, logits_bytes
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, Holdings, allocated_bytes, part_memory, part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.moved_bytes import layer_elements, loss_bytes
from megatron_hexi.cost.products import layer_products
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import Recompute

#: Modes of recomputation that planners offer to dense models. A GPU's works are x of each, then z of each.
MODES: Final[tuple[Recompute, ...]] = ("none", "selective", ("mlp",), "full")
#: Ratio of the most to the least layers of an option.
_LAYERS_STEP = 1.2
#: The same ratio for stages in ministages, and for the number of ministages.
_TURNS_STEP = 2.0
#: Steps of the iteration that lowers an upper bound of rows; each of them is a bound.
_STEPS = 4


@dataclass(frozen=True, eq=False)
class Places:
    """Possible positions of a GPU in a replica, arrays over positions, [P].

    Args:
        low: the least layers of its stage.
        high: the most layers of its stage.
        last: 1 on the last stage of its replica, else 0.
        parts: the least ministages of the stage; 0: it runs whole.
        most_parts: the most ministages of the stage.
        fewest: the least sequences that the replica processes.
        most: the most sequences that the replica processes.
        share: the number of this range of sequences.
    """

    low: Ints
    high: Ints
    last: Ints
    parts: Ints
    most_parts: Ints
    fewest: Ints
    most: Ints
    share: Ints

    @classmethod
    def of(cls, layers: int, stages: int | None, shares: list[tuple[int, int]]) -> Places:
        """Return all positions, for ranges of layers and ministages, and the given ranges of sequences.

        Args:
            stages: stages of each replica; ``None``: any number. A single stage has all layers.
            shares: ranges of sequences that a replica processes.
        """
        most = 0 if stages == 1 else layers + 1 - (stages or 2)
        alone = [(layers, layers, 1)] if stages in (None, 1) else []
        whole = [(*span, last) for span in ranges(1, most, _LAYERS_STEP) for last in (0, 1)]
        turns = [(*span, 1) for span in ranges(1, most, _TURNS_STEP)]
        ends = [(*end, 0, 0) for end in whole + alone] + [(1, most, 0, 1, layers)] * (most > 0)
        ends += [(*end, *parts) for end in turns + alone for parts in ranges(1, layers, _TURNS_STEP)]
        rows = [(*end, *share, number) for end in ends for number, share in enumerate(shares)]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 8).T)


def ranges(first: int, last: int, factor: float) -> Iterator[tuple[int, int]]:
    """Return ranges of whole numbers from `first` to `last`, each spanning less than `factor`."""
    while first <= last:
        end = max(first, math.ceil(first * factor) - 1)
        yield first, min(last, end)
        first = end + 1


class UnitCandidates:
    """GPUs of one kind in tensor-parallel units of one size, at all positions.

    Args:
        job: the job with that tensor-parallel size, one sequence a micro-batch and no recomputation.
        node: a node with such GPUs.
        sizes: the least and the most sequences of a micro-batch.
        mixed: whether a stage may recompute some of its layers.

    Raises:
        ClusterError: the GPU cannot do the job.
    """

    def __init__(self, job: Job, node: Node, places: Places, sizes: tuple[int, int], mixed: bool) -> None:
        self._job, self._places, self._most = job, places, sizes[1]
        turns = places.parts > 0
        #: Forward passes that ministages add, [P].
        self._again = turns * (1 - places.last / np.maximum(places.parts, 1))
        speeds, length = device_speeds(node.device, job), job.seq_length
        # An own block is of size S at most; a rectangle of q queries and k keys of sqrt(q k), q + k <= S.
        self._speeds = replace(
            speeds,
            matmul=_rising(speeds.matmul),
            causal=_up_to(speeds.causal, length),
            full=_up_to(speeds.full, length / 2),
        )
        sums = tensor_parallel_seconds(job, np.ones(1), np.array([node.bandwidth]), np.zeros(1))
        # A row forward, backward and through the logits: FLOPs at the rate of matrices, and seconds besides.
        flops, seconds = _row_work(self._speeds, job)
        self._row_flops, self._row_s = flops[:, None], (seconds + np.array([2, 2, 1]) * sums[0])[:, None]
        #: The job without multi-token prediction, which is counted on last stages.
        self._plain = replace(job, model=replace(job.model, mtp_layers=0))
        self._attention_s = [
            length * attention_seconds(self._speeds, replace(self._plain, recompute=mode), causal=True)
            for mode in MODES
        ]
        mlp = job.model.feed_forward.matrices(job.model, job.tensor_parallel)
        #: Part of a layer's products that the MLP has.
        self._mlp = sum(matrix.weights for matrix in mlp) / layer_products(job).weights
        part = ModelPart(places.low, 0, places.low == job.model.layers, places.last > 0, 1)
        params = np.asarray(part_params(job, part), dtype=float)
        #: Seconds of the optimizer's step, at least, [P].
        self.step_s = optimizer_seconds(speeds, job, params, 0 * params)
        largest = np.maximum(1, places.low / np.maximum(places.most_parts, 1))
        held = np.where(turns, largest * job.model.layer_params(job.tensor_parallel), params)
        self._set_bytes(node.device.usable_gib * GIB, held, sizes[0], mixed)

    def _set_bytes(self, usable: float, params: Floats, least: int, mixed: bool) -> None:
        job, places, layers = self._job, self._places, self._job.model.layers
        local, nothing = job.workload(), np.zeros(2)
        tokens, attended = np.eye(2)
        heads, kv = (np.full(2, float(count)) for count in (local.local_heads, local.local_kv_heads))
        # A token held and nothing attended to, and the other way round.
        held = Holdings(tokens, attended, heads, kv, np.ones(2, dtype=np.int64), Flights(nothing, nothing))
        turn = least / places.most  # 1 / m at least
        one_layer = layers / places.high * turn
        kept_layers = np.where(
            places.parts > 0,
            np.maximum(layers * turn / np.maximum(places.most_parts, 1), one_layer),
            layers * np.minimum(1, (2 - places.last) * turn),
        )
        scale = allocated_bytes(float(job.seq_length * job.tensor_parallel))
        #: Bytes of x in each mode, and of as much of tokens attended to with all heads, [P, modes].
        self.held_bytes, self.attended_bytes = np.zeros((2, len(turn), len(MODES)))
        # Bytes of an output, which a unit alone in its group has among its tokens' inputs.
        output = np.array([0, job.element_bytes * job.model.value_dim * local.local_heads])
        loss = float(logits_bytes(self._plain, np.ones(1), logit_bytes(job))[0])
        # Of multi-token prediction only weights are counted.
        for mode, recompute in enumerate(MODES):
            part = ModelPart(1, int(mode > 0), is_first=True, is_last=True, ahead=1)
            terms = part_memory(replace(self._plain, recompute=recompute), part, held, 1, 0.0)
            kept, layer = terms["activations"] + terms["attention"], terms["working_set"]
            if recompute == "none":
                kept, plain = kept - output, layer
            elif recompute == "selective":
                layer = layer - output
            elif recompute != "full":
                kept, layer = kept - output, plain
            else:  # no layer is there whole where others are not computed again
                layer = plain if mixed else layer - output
            # The loss comes before the working set: the larger of the two.
            if_last = np.array([loss, 0]) if loss > layer.sum() else layer
            there = np.where(places.last > 0, if_last[:, None], layer[:, None])
            self.held_bytes[:, mode] = scale * (kept[0] * kept_layers + there[0] * one_layer)
            self.attended_bytes[:, mode] = scale * (kept[1] * kept_layers + there[1] * one_layer)
        each = (terms["weights"] + terms["gradients"])[0] / part_params(self._plain, part)
        #: Bytes that weights and gradients leave, [P]; not above 0: no GPU can be there.
        self.room = usable - RESERVE_BYTES - each * params

    def seconds(self, iteration_s: float) -> Floats:
        """Return lower bounds of each work's seconds in an iteration of at most `iteration_s`, [P, works].

        A unit takes r rows m times through l layers in that time. At the rate of an upper bound of r, that
        gives a lower upper bound, and at its rate again a lower one.
        """
        job, places = self._job, self._places
        layers, width = job.model.layers, job.tensor_parallel
        turns = np.maximum(1.0, places.fewest / self._most) * places.low
        rows = np.full(len(turns), float(self._most * job.seq_length))
        for _ in range(_STEPS):
            products = self._row_flops / rates(self._speeds.matmul, rows)
            forward, backward, logits = products + self._row_s
            rows = np.minimum(rows, iteration_s / (turns * (forward + backward)))
        more = job.model.mtp_layers
        ends = places.last * (logits + more * (forward + backward)) / places.high
        again: dict[Recompute, Floats] = {"full": forward, ("mlp",): self._mlp * products[0]}
        tokens = [(1 + self._again) * forward + backward + ends + again.get(mode, 0.0) for mode in MODES]
        token_s = job.seq_length * layers * width * np.array(tokens).T
        once = self._attention_s[-1] - self._attention_s[0]
        attention_s = np.array(self._attention_s) + self._again[:, None] * once
        # Layers of multi-token prediction attend as all layers of their stage do.
        attention_s = attention_s * (1 + places.last * more / places.high)[:, None]
        return np.concatenate([token_s, attention_s], axis=1)


def _row_work(speeds: Speeds, job: Job) -> tuple[Floats, Floats]:
    """Return lower bounds of the work of one row: in a layer forward, in a layer backward, and in the loss.

    The seconds of the FLOPs, at the rate of any number of rows, plus the seconds of memory traffic, are no
    more than the `token_times` and `logits_times` of these rows.

    Returns:
        FLOPs of matrix products, [3], and seconds of memory traffic, [3].
    """
    layer, (forward, backward) = layer_products(job), layer_elements(job, speeds.fp8_copies)
    element, loss = job.element_bytes / speeds.memory, loss_bytes(job)
    matrix, projection = output_products(job)
    inner = job.model.mtp_layers * projection
    ends = sum(sizes.outputs + sizes.inputs for sizes in (matrix, inner))
    back = 2 if job.lora_rank else 4  # frozen weights have no gradients
    return (
        np.array([2 * layer.weights, back * layer.weights, (2 + back) * (matrix.weights + inner.weights)]),
        np.array(
            [
                (layer.outputs + forward) * element,
                (layer.inputs + backward) * element,
                ends * element + sum(loss) / speeds.memory,
            ]
        ),
    )


def _rising(curve: Curve) -> Curve:
    """Return the smallest curve above this one that never falls."""
    return replace(curve, rates=tuple(itertools.accumulate(curve.rates, max)))


def _up_to(passes: PassCurves, size: float) -> PassCurves:
    """Return passes that have, at every size, the best rates up to this size."""
    both = (_rising(curve) for curve in (passes.forward, passes.backward))
    return PassCurves(*(replace(curve, sizes=(1.0,), rates=(curve.rate(size),)) for curve in both))
