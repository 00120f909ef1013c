"""`python -m benchmarks.launches`: what one attention layer asks of a GPU, counted without one.

4 groups of 4 ranks, 131,072 tokens, 32 query heads over 8 KV heads of 128, in bf16; a sequence that is not
packed, of 32 and of 128 documents. Forward and backward of a rank run on fake CUDA tensors, which have shapes
and no contents, and every operator that a device would carry out is counted, with the bytes that it reads and
writes: attention kernels apart from all else.

What is counted: each operator of torch and each launch of our own is one operation. Its bytes are those of
all tensors that it is given and gives: what it writes in place counts twice, what an index takes from whole;
a launch reads and writes each of its tensors once, tables included. Not counted: what attention kernels read,
write and launch by themselves, what travels, and tables that a schedule keeps for all layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hexi.plan import Mask, Workload, build_schedule, proportional_plan
from megatron_hexi.plan.proportion import worthwhile_parts
from megatron_hexi.runtime import all_to_all, call_rows, exchange, fused
from megatron_hexi.runtime.attention import _DomainAttentionFunction
from megatron_hexi.runtime.fused import on_gpu
from megatron_hexi.runtime.kernels import select_kernel
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from megatron_hexi.runtime.wire import Transfers

DEVICE = torch.device("cuda:0")
TOKENS = 2**17


@dataclass(frozen=True)
class Row:
    """One rank, one layer, forward and backward.

    Args:
        documents: in the sequence.
        kernels: calls of attention kernels.
        others: all other operations of the device.
        moved_mib: what these read and write.
    """

    documents: int
    kernels: int
    others: int
    moved_mib: float


class _Counter(TorchDispatchMode):
    """Counts operators that a device would carry out: not views, and not memory without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.others = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        is_operator = func.namespace != "prim"  # nor a question, such as for the device
        if (
            not is_operator
            or func.is_view
            or name.startswith(("empty", "new_empty", "_unsafe_view"))
            or not tensors
        ):
            return result
        if "attention" in name:
            self.kernels += 1
        else:
            self._note(tensors)
        return result

    def launch(
        self,
        kernel: str,
        grid: Any,
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
        *arguments: Any,
        **constants: Any,
    ) -> None:
        """Counts a launch of our own."""
        self._note([tensor for tensor in (*reads, *writes) if tensor is not None])

    def _note(self, tensors: Sequence[Tensor]) -> None:
        self.others += 1
        self.moved += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Context:
    """What autograd gives a function; its engine does not run on fake tensors."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def lengths(documents: int) -> tuple[int, ...] | None:
    """Lengths of so many documents, log-normal, the same in every run; together as long as the sequence."""
    if documents == 0:
        return None
    random = Random(documents)
    weights = [random.lognormvariate(0, 1) for _ in range(documents)]
    found = [max(16, int(weight / sum(weights) * TOKENS)) for weight in weights]
    found[found.index(max(found))] += TOKENS - sum(found)
    return tuple(found)


def count(documents: int) -> Row:
    """Count one layer of one rank.

    Args:
        documents: in the sequence; 0: it is not packed.
    """
    plan = proportional_plan(Workload(TOKENS, 32, 8, 128), [[[1] * 4] * 4])
    workload, domain = plan.workload, plan.replicas[0].domain
    parts = worthwhile_parts(plan.replicas)
    # The first rank of the second group; the others differ by few copies.
    schedule = build_schedule(workload, domain, 4, parts, Mask(documents=lengths(documents)))
    return _count(documents, schedule, workload)


def _count(documents: int, schedule: Any, workload: Workload) -> Row:
    with _hopper():
        kernel = select_kernel("aten-flash", DEVICE, torch.bfloat16, workload.head_dim)
        groups = mock.sentinel.domain, mock.sentinel.a2a
        with FakeTensorMode(), torch.no_grad():
            query, key, value = (
                torch.empty(schedule.tokens, 1, heads, 128, dtype=torch.bfloat16, device=DEVICE)
                for heads in (workload.heads, workload.kv_heads, workload.kv_heads)
            )
            layer = AttentionLayer(schedule, kernel, 0.1, *groups, 1, Inputs.from_tensors(query, key, value))
            for counter in (_Counter(), _Counter()):  # the first makes what the schedule keeps
                with counter, mock.patch.object(on_gpu, "launch", counter.launch):
                    context: Any = _Context()
                    output = _DomainAttentionFunction.forward(context, query, key, value, None, None, layer)
                    _DomainAttentionFunction.backward(context, torch.empty_like(output))
    return Row(documents, counter.kernels, counter.others, counter.moved / 2**20)


@contextmanager
def _hopper() -> Iterator[None]:
    """A GPU as far as kernels look at it, and nothing sent."""

    def on_device(tensor: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(tensor, device=device)

    with (
        mock.patch.object(call_rows, "on_device", on_device),
        mock.patch.object(fused, "has_triton", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(all_to_all, "all_to_all", return_value=Transfers()),
        mock.patch.object(exchange, "post", return_value=Transfers()),
    ):
        yield


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[0, 32, 128], help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(words)
    rows = [count(documents) for documents in options.documents]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print("documents  kernels  others  together  MiB moved")
    for row in rows:
        together = row.kernels + row.others
        print(f"{row.documents:9d} {row.kernels:8d} {row.others:7d} {together:9d} {row.moved_mib:10.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
