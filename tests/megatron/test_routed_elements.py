"""Elements that Megatron's dispatcher and bias of experts read and write, seen by torch's dispatcher."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hexi.cost.moved_bytes import routed_elements
from megatron_hexi.kinds import Experts
from tests.support.costs import TINY, tiny_job

TOKENS, COLUMNS, COUNT, ACTIVE, PARTS = 24, 64, 4, 2, 3
ROWS = TOKENS * ACTIVE
MODEL = dataclasses.replace(TINY, experts=Experts(COUNT, ACTIVE, 64), biases=False)
#: Operations that start no kernel, that only write, and that touch as many rows as they move.
VIEWS = {"view", "expand", "slice", "split_with_sizes", "permute", "detach"}
FILLS = {"zeros", "new_zeros"}
SELECTS, ADDS = {"index_select", "gather"}, {"index_add", "scatter_add_"}


class Moved(TorchDispatchMode):
    """Adds up elements of rows that kernels read and write; sums over rows, and vectors, are none."""

    def __init__(self):
        super().__init__()
        self.rows = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in SELECTS or name in ADDS:
            self.rows += 2 + (name in ADDS)  # what is added to is read and written
        elif name not in VIEWS:
            read = [one for value in args for one in (value if isinstance(value, list) else [value])]
            moved = [out] if name in FILLS else [*read, out]
            self.rows += sum(map(_elements, moved)) / (ROWS * COLUMNS)
        return out


def _elements(value):
    is_rows = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == COLUMNS
    return value.numel() if is_rows and value.shape[0] > 1 else 0


def passes(compute):
    """Elements that a forward and a backward pass read and write, in rows."""
    with Moved() as forward:
        result = compute()
    gradient = torch.ones_like(result)
    with Moved() as backward:
        result.backward(gradient)
    return forward.rows, backward.rows


def test_rows_are_moved_as_counted():
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    routing = torch.zeros(TOKENS, COUNT, dtype=torch.bool)
    for token in range(TOKENS):
        routing[token, [token % COUNT, (token + 1) % COUNT]] = True
    sizes = torch.tensor([ROWS // PARTS] * PARTS)
    there, back = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    tokens = torch.randn(TOKENS, COLUMNS, requires_grad=True)

    def travel():
        rows, _, order, _, _ = permute(tokens, routing, num_out_tokens=ROWS)
        for sorts in (there, back):
            rows, _ = sort_chunks_by_idxs(rows, sizes, sorts)
        return unpermute(rows, order, torch.Size((TOKENS, COLUMNS)))

    assert passes(travel) == pytest.approx(routed_elements(tiny_job(model=MODEL)))


def test_biases_are_added_as_counted():
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    rows, probabilities = (
        torch.randn(ROWS, COLUMNS, requires_grad=True),
        torch.rand(ROWS, 1, requires_grad=True),
    )
    biases = [torch.randn(COLUMNS, requires_grad=True) for _ in range(PARTS)]
    sizes = [ROWS // PARTS] * PARTS
    found = passes(lambda: TEGroupedMLP._apply_bias(rows, biases, sizes, probabilities))
    biased = dataclasses.replace(MODEL, biases=True)
    both = zip(*(routed_elements(tiny_job(model=model)) for model in (biased, MODEL)), strict=True)
    assert found == pytest.approx(tuple(more - less for more, less in both))
