"""Gradients in pieces are sums over holders, whoever is ready first, and values are those of the owners."""

import time
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from megatron_hexi.mesh import cut_pieces, make_buckets
from megatron_hexi.runtime.bucket_buffer import HeldBox
from megatron_hexi.runtime.piece_buffers import PieceBuffers
from tests.support.plans import examples
from tests.support.stage_plans import boxes_of, meshes, parameters_of
from tests.support.threads import run_ranks

SEEDS = st.integers(0, 2**24 - 1)
SIZES = st.sampled_from([None, 1, 20, 60])
MESHES = meshes(most_ranks=6)
ITERATIONS, MICRO_BATCHES = 2, 2


class RankModel:
    """A rank's parameters with their boxes, and the gradients that they get.

    Args:
        mesh: the units of all ranks.
        rank: this rank.
        dtype: of its parameters. Gradients in bf16 are whole numbers, whose sums are exact.
        seed: of its values and gradients.
    """

    def __init__(self, mesh, rank, dtype, seed):
        self.held, self.gradients, self.scales = [], {}, {}
        width = mesh.units[rank].width
        generator = torch.Generator().manual_seed(100 * seed + rank)

        def draw(shape):
            if dtype == torch.bfloat16:
                return torch.randint(-2, 3, shape, generator=generator).to(dtype)
            return torch.randn(shape, generator=generator, dtype=dtype)

        for one in parameters_of(mesh, rank):
            stacked = int(one.boxes[0].key.startswith("layers."))
            first, *rest = [stop - start for start, stop in one.boxes[0].cell][stacked:]
            data = draw((first * len(one.boxes), *rest))
            if one.boxes[0].key == "layers.rows" and rank % 2:
                data = data.T.contiguous().T  # laid out otherwise
            parameter = Parameter(data)
            for number, box in enumerate(one.boxes):
                offset = number * first * parameter.stride(0)
                self.held.append(HeldBox(box, parameter, (0,) * stacked + parameter.stride(), offset))
            steps = ITERATIONS * MICRO_BATCHES
            self.gradients[parameter] = [draw(parameter.shape) for _ in range(steps)]
            self.scales[parameter] = 1 / width if one.is_copy else 1.0


def whole_weights(mesh):
    """Zeros in fp64, a whole weight of each name."""
    return {box.key: torch.zeros(box.shape, dtype=torch.float64) for own in boxes_of(mesh) for box in own}


def part(whole, cell):
    return whole[tuple(slice(*span) for span in cell)]


def expected_sums(mesh, dtype, seed, iteration):
    """The gradients of whole weights: what all holders add up, each copy by its share."""
    sums = whole_weights(mesh)
    for rank in range(len(mesh.units)):
        model = RankModel(mesh, rank, dtype, seed)
        for held in model.held:
            steps = model.gradients[held.parameter][iteration * MICRO_BATCHES :][:MICRO_BATCHES]
            for gradient in steps:
                scaled = gradient.double() * model.scales[held.parameter]
                part(sums[held.box.key], held.box.cell).add_(part_of(held, scaled))
    return sums


def part_of(held, tensor):
    """A box's elements by plain slicing, in a tensor of its parameter's shape."""
    sizes = [stop - start for start, stop in held.box.cell]
    rows = sizes[len(sizes) - tensor.dim()]
    first = held.offset // held.parameter.stride(0)
    return tensor[first : first + rows].reshape(sizes)


def new_values(mesh, dtype, seed):
    """What owners set whole weights to."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(-99, 99, whole.shape, generator=generator).to(dtype)
        for key, whole in whole_weights(mesh).items()
    }


def run_buffers(mesh, dtype, seed, size, in_fp32, pauses=0.0):
    """Iterations as Megatron runs them, on every rank.

    Returns:
        For each rank: values that it started with, gradients of its slabs in each iteration, and values in
        the end.
    """
    states = {rank: unit.state for rank, unit in enumerate(mesh.units)}
    buckets = make_buckets(cut_pieces(boxes_of(mesh)), states, size)

    def work(thread):
        model, random = RankModel(mesh, thread.rank, dtype, seed), Random(seed + thread.rank)

        def group_of(ranks):
            if len(ranks) == 1 or thread.rank not in ranks:
                return None
            return thread.new_group(f"holders-{ranks}", ranks)

        buffers = PieceBuffers(
            buckets,
            model.held,
            model.scales.__getitem__,
            thread.rank,
            group_of,
            torch.float32 if in_fp32 else None,
        )
        buffers.take_values_from(max)
        started = [(held.box, part_of(held, held.parameter.data).clone()) for held in model.held]
        sums = []
        parameters: list[Any] = list(model.gradients)
        for iteration in range(ITERATIONS):
            buffers.reset()
            for micro_batch in range(MICRO_BATCHES):
                buffers.is_last_microbatch = micro_batch == MICRO_BATCHES - 1
                for parameter in random.sample(parameters, len(parameters)):
                    parameter.main_grad.add_(
                        model.gradients[parameter][iteration * MICRO_BATCHES + micro_batch]
                    )
                    time.sleep(random.random() * pauses)
                    buffers.register_grad_ready(parameter)
            buffers.finish_grad_sync()
            sums.append([(slab, gradient_of(buffer, slab).clone()) for buffer, slab in buffers.owned()])
        buffers.scale_gradients(0.5)
        sums.append([(slab, gradient_of(buffer, slab)) for buffer, slab in buffers.owned()])
        new = new_values(mesh, dtype, seed)
        for buffer, slab in buffers.owned():
            buffer.values[slab.start : slab.stop] = part(new[slab.key], slab.cell).flatten()
        overlaps = bool(seed % 2)  # on all ranks
        buffers.broadcast_values(waits=not overlaps)
        for parameter in random.sample(parameters, len(parameters) * overlaps):
            buffers.settle_values([parameter])
        ended = [(held.box, part_of(held, held.parameter.data)) for held in model.held]
        return started, sums, ended

    return run_ranks(len(mesh.units), work)


def gradient_of(buffer, slab):
    return buffer.gradients[slab.start : slab.stop].view([stop - start for start, stop in slab.cell])


def check_sums(results, mesh, dtype, seed):
    """Every element of every weight has one owner, which has the sum over all holders."""
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-5
    for iteration in range(ITERATIONS + 1):
        expected = expected_sums(mesh, dtype, seed, min(iteration, ITERATIONS - 1))
        factor = 0.5 if iteration == ITERATIONS else 1.0
        owned = whole_weights(mesh)
        for _, sums, _ in results:
            for slab, gradient in sums[iteration]:
                true = part(expected[slab.key], slab.cell) * factor
                torch.testing.assert_close(gradient.double(), true, atol=tolerance, rtol=tolerance)
                part(owned[slab.key], slab.cell).add_(1)
        assert all((count == 1).all() for count in owned.values())


@pytest.mark.parametrize(
    ("dtype", "in_fp32"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "bf16-summed-in-fp32"],
)
def test_gradients_of_any_boxes_are_the_sums_over_their_holders(dtype, in_fp32):
    @examples(12)
    @given(mesh=MESHES, seed=SEEDS, size=SIZES)
    def add_up(mesh, seed, size):
        check_sums(run_buffers(mesh, dtype, seed, size, in_fp32), mesh, dtype, seed)

    add_up()


@examples(8)
@given(mesh=MESHES, seed=SEEDS, size=SIZES)
def test_gradients_that_are_ready_in_any_order_and_at_any_time_give_the_same_sums(mesh, seed, size):
    results = run_buffers(mesh, torch.float32, seed, size, in_fp32=False, pauses=0.003)
    check_sums(results, mesh, torch.float32, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_one_holder_at_first_and_of_the_owners_later(dtype):
    @examples(12)
    @given(mesh=MESHES, seed=SEEDS, size=SIZES)
    def hand_out(mesh, seed, size):
        before = [RankModel(mesh, rank, dtype, seed) for rank in range(len(mesh.units))]
        first = whole_weights(mesh)
        for model in before:  # the last holder's stay
            for held in model.held:
                part(first[held.box.key], held.box.cell).copy_(part_of(held, held.parameter.data))
        new = new_values(mesh, dtype, seed)
        for started, _, ended in run_buffers(mesh, dtype, seed, size, in_fp32=False):
            for box, values in started:
                assert torch.equal(values.double(), part(first[box.key], box.cell))
            for box, values in ended:
                assert torch.equal(values, part(new[box.key], box.cell))

    hand_out()


def test_sums_start_as_soon_as_all_their_gradients_are_there(monkeypatch):
    """In the order of the table: all that lies behind the last layer with a gradient missing is under way."""
    launched = []
    original = PieceBuffers._launch

    def launch(self):
        launched.append(self.buckets[self._launched].bucket.depth)
        original(self)

    monkeypatch.setattr(PieceBuffers, "_launch", launch)

    @examples(10)
    @given(mesh=meshes(most_ranks=2), seed=SEEDS)
    def overlap(mesh, seed):
        model = RankModel(mesh, 0, torch.float32, seed)
        boxes = [[held.box for held in model.held], *[[] for _ in mesh.units[1:]]]
        others = [box for own in boxes_of(mesh)[1:] for box in own]
        boxes[1] = [box for box in others if box not in boxes[0]]
        buckets = make_buckets(cut_pieces(boxes), {0: 1, 1: 1}, 1)
        buffers = PieceBuffers(buckets, model.held, lambda _: 1.0, 0, lambda _: None, None)
        buffers.reset()
        launched.clear()
        depth_of = {held.parameter: held.box.depth for held in model.held}
        left = sorted(depth_of, key=depth_of.__getitem__, reverse=True)
        depths = [buffer.bucket.depth for buffer in buffers.buckets]
        while left:
            buffers.register_grad_ready(left.pop(0))
            missing = max((depth_of[one] for one in left), default=-1)
            assert [depth for depth in launched if depth > missing] == [
                depth for depth in depths if depth > missing
            ]
        assert len(launched) == len(buffers.buckets)

    overlap()


def unscaled(self, *args):
    buffer = lay_out(self, *args)
    buffer.scales.clear()
    return buffer


def one_holder_less(self, *args):
    """A rank adds nothing to its first bucket."""
    buffer = lay_out(self, *args)
    if self.rank == 0 and not self.buckets:
        buffer.scales.append((slice(0, buffer.bucket.size), 0.0))
    return buffer


def not_copied_in(self, *args):
    buffer = lay_out(self, *args)
    del buffer.copied[:1]
    return buffer


lay_out = PieceBuffers._lay_out


@pytest.mark.parametrize("fault", [unscaled, one_holder_less, not_copied_in])
def test_the_check_finds_sums_that_are_wrong(fault, monkeypatch):
    monkeypatch.setattr(PieceBuffers, "_lay_out", fault)
    caught = 0

    @examples(12)
    @given(mesh=MESHES, seed=SEEDS)
    def search(mesh, seed):
        nonlocal caught
        try:
            results = run_buffers(mesh, torch.float32, seed, 20, in_fp32=False)
            check_sums(results, mesh, torch.float32, seed)
        except AssertionError:
            caught += 1

    search()
    assert caught >= 2
