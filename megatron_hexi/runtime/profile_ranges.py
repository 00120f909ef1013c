"""Named ranges for the phases of attention in a profile, while one is being recorded.

torch's own `record_function`, not `torch.cuda.nvtx`: under `emit_nvtx`, which Megatron's ``--profile`` enters
for Nsight Systems, torch makes NVTX ranges of it, and under torch's profiler (``--use-pytorch-profiler``)
events of its trace. So one name serves both, no flag of ours is needed, and torch knows whether a profile is
being recorded: a pass asks once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from megatron_hexi.plan.program import Operation, OwnBlock, Post, Wait


def named[T](phases: Iterable[tuple[Operation, T]]) -> Iterable[tuple[Operation, T]]:
    """Yield the operations of a pass with their launches, each within a named range of a profile."""
    return _in_ranges(phases) if _profiler_enabled() else phases


def _in_ranges[T](phases: Iterable[tuple[Operation, T]]) -> Iterator[tuple[Operation, T]]:
    for operation, launches in phases:
        with record_function(f"hexi: {_spell(operation)}"):
            yield operation, launches


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
