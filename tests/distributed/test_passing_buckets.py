"""Weights that come a ministage at a time are their owners', gradients the sums over all holders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.mesh import cut_pieces, make_buckets, ministage_passes
from megatron_hexi.plan.terms import Offload
from megatron_hexi.runtime.piece_buffers import PieceBuffers
from tests.distributed.test_piece_buffers import (
    ITERATIONS,
    MESHES,
    MICRO_BATCHES,
    SEEDS,
    SIZES,
    RankModel,
    check_sums,
    new_values,
    part,
    part_of,
)
from tests.support.plans import examples
from tests.support.stage_plans import boxes_of
from tests.support.threads import run_ranks


def in_turns(box: Any, ministages: int, rank: int | None = None) -> Any:
    """Layers in turns, of a rank that runs by itself, or in step with all; embeddings are at both ends."""
    if box.key == "embedding":
        return box
    return replace(box, ministage=(0 if rank is None else rank, 0, box.depth % ministages))


def nothing(rank: int) -> tuple[Offload, ...]:
    return ()


def everything(rank: int) -> tuple[Offload, ...]:
    return ("parameters", "optimizer")


def of_odd_ranks(rank: int) -> tuple[Offload, ...]:
    """Others hold the same on the device."""
    return everything(rank) if rank % 2 else nothing(rank)


def run_ministages(mesh, dtype, seed, size, ministages, offload_of=nothing, in_step=True):
    """Iterations of backward passes, each a ministage at a time; then new weights of the owners.

    Args:
        offload_of: what waits in host memory, of each rank.
        in_step: whether the holders of a bucket keep shares.

    Returns:
        As `run_buffers`, without values at first.
    """
    states = {rank: unit.state for rank, unit in enumerate(mesh.units)}
    turns = [None if in_step else rank for rank in range(len(mesh.units))]
    boxes = [
        [in_turns(box, ministages, turn) for box in own]
        for turn, own in zip(turns, boxes_of(mesh), strict=True)
    ]
    buckets = make_buckets(cut_pieces(boxes), states, size)

    def work(thread):
        model = RankModel(mesh, thread.rank, dtype, seed)
        held: list[Any] = [
            replace(one, box=in_turns(one.box, ministages, turns[thread.rank])) for one in model.held
        ]
        number_of: dict[Any, int] = {
            one.parameter: one.box.ministage[2] if one.box.ministage else 0 for one in held
        }

        def group_of(ranks):
            if len(ranks) == 1 or thread.rank not in ranks:
                return None
            return thread.new_group(f"holders-{ranks}", ranks)

        buffers = PieceBuffers(
            buckets, held, model.scales.__getitem__, thread.rank, group_of, torch.float32, offload_of
        )
        buffers.take_values_from(max)
        first = {one: one.data.clone() for one in number_of}
        passing: list[Any] = [buffer for buffer in buffers.buckets if buffer.passes]
        buffers.release()
        assert not sum(buffer.values.untyped_storage().nbytes() for buffer in passing)
        kept: list[Any] = [one.stored_gradients for one in buffers.buckets if one.residence.gradients_on_host]
        kept += [one.stored_values for one in passing if one.residence.weights_on_host]
        assert buffers.host.nbytes == sum(tensor.nbytes for tensor in kept)
        sums = []
        for iteration in range(ITERATIONS):
            buffers.reset()
            for sweep in (one for one in ministage_passes(ministages, gives_loss=True) if one.is_backward):
                with buffers.ministage_pass(sweep):
                    for buffer in passing:
                        is_here = buffer.values.untyped_storage().nbytes() > 0
                        assert is_here == (buffer.residence.ministage in sweep.weights)
                        has_gradients = buffer.gradients.untyped_storage().nbytes() > 0
                        assert has_gradients == (buffer.residence.ministage in sweep.gradients)
                    for parameter in (one for one, used in number_of.items() if used == sweep.ministage):
                        assert torch.equal(parameter.data, first[parameter])
                        for step in range(MICRO_BATCHES):
                            parameter.main_grad.add_(
                                model.gradients[parameter][iteration * MICRO_BATCHES + step]
                            )
                        buffers.register_grad_ready(parameter)
            buffers.finish_grad_sync()
            sums.append(own_gradients(buffers))
        buffers.scale_gradients(0.5)
        sums.append(own_gradients(buffers))
        new = new_values(mesh, dtype, seed)
        for buffer, slab in buffers.owned():
            own(buffer, buffer.own_values, slab).copy_(part(new[slab.key], slab.cell).flatten())
        buffers.broadcast_values()
        with buffers.whole():
            ended = [(one.box, part_of(one, one.parameter.data).clone()) for one in held]
        assert not sum(buffer.values.untyped_storage().nbytes() for buffer in passing)
        return [], sums, ended

    return run_ranks(len(mesh.units), work)


def own(buffer, tensor, slab):
    return tensor[slab.start - buffer.own_run.start : slab.stop - buffer.own_run.start]


def own_gradients(buffers):
    return [
        (
            slab,
            own(buffer, buffer.own_gradients, slab).clone().view([stop - start for start, stop in slab.cell]),
        )
        for buffer, slab in buffers.owned()
    ]


@pytest.mark.parametrize(
    ("dtype", "offload_of", "in_step"),
    [
        pytest.param(torch.float32, nothing, True, id="fp32"),
        pytest.param(torch.bfloat16, nothing, True, id="bf16"),
        pytest.param(torch.float32, everything, True, id="fp32-offloaded"),
        pytest.param(torch.bfloat16, everything, False, id="bf16-offloaded-alone"),
        pytest.param(torch.float32, of_odd_ranks, False, id="fp32-offloaded-by-some"),
    ],
)
def test_weights_and_gradients_are_there_when_they_are_needed(dtype, offload_of, in_step):
    @examples(4)
    @given(mesh=MESHES, seed=SEEDS, size=SIZES, ministages=st.integers(1, 3))
    def run(mesh, seed, size, ministages):
        results = run_ministages(mesh, dtype, seed, size, ministages, offload_of, in_step)
        check_sums(results, mesh, dtype, seed)
        new = new_values(mesh, dtype, seed)
        for _, _, ended in results:
            for box, values in ended:
                assert torch.equal(values, part(new[box.key], box.cell))

    run()
