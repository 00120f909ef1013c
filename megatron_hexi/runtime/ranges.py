"""Names for the phases of attention in a profile, where somebody profiles.

torch's own `record_function`, not `torch.cuda.nvtx`: under `emit_nvtx`, which Megatron's ``--profile`` enters
for Nsight Systems, torch makes NVTX ranges of it, and under torch's profiler (``--use-pytorch-profiler``)
events of its trace. So one name serves both, no flag of ours is needed, and torch knows whether anybody asks:
one look a pass, and nothing else where nobody does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from megatron_hexi.plan.program import Batch, Operation, OwnBlock, Post, Wait

#: What the caller of a pass does: the pass has nothing to do there.
_AROUND = {*(Post(Batch("in", half)) for half in (0, 1)), *(Wait(Batch("out", half)) for half in (0, 1))}


def named(operations: Iterable[Operation]) -> Iterable[Operation]:
    """The operations of a pass; while one is carried out, a profile shows it under its name."""
    return _in_ranges(operations) if _profiler_enabled() else operations


def phase(name: str) -> AbstractContextManager[object]:
    """What a profile shows what is done inside as."""
    return record_function(f"hexi: {name}") if _profiler_enabled() else nullcontext()


def _in_ranges(operations: Iterable[Operation]) -> Iterator[Operation]:
    for operation in operations:
        if operation in _AROUND:
            yield operation
            continue
        with record_function(f"hexi: {_spell(operation)}"):
            yield operation


def _spell(operation: Operation) -> str:
    match operation:
        case OwnBlock(first, stop):
            return "own block" if (first, stop) == (0, 2) else f"own block, half {first}"
        case Post(batch) | Wait(batch):
            verb = "post" if isinstance(operation, Post) else "wait for"
            if batch.cargo in ("in", "out"):
                return f"{verb} all-to-all {batch.cargo}, half {batch.step}"
            return f"{verb} {batch.cargo} of step {batch.step}, part {batch.part}"
    return f"blocks of step {operation.step}, part {operation.part}"
