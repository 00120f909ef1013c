"""`python -m benchmarks.one_gpu.standby ENTRY [arguments]`: imports all, and runs the entry on its turn.

Importing torch, Transformer Engine and Megatron takes longer than most of what is measured. The process waits
for a line on its standard input before it calls the entry point's `main`; an end of the input ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path

#: Where a rank says how much memory torch's allocator handed out at most.
PEAK = "peak-{rank}.json"
#: What training imports, also later on: by Megatron's tokenizers and torch's optimizers among others.
_TRAINING = (
    *("megatron_hexi.adaptor", "megatron_hexi.megatron.gpt", "megatron.core.tokenizers.text"),
    *("megatron.core.models.mimo", "megatron.core.datasets.helpers", "torch._dynamo"),
    *("torch._inductor.compile_fx", "torch.distributed.checkpoint", "transformers"),
)


def main() -> None:
    """Import, wait, run, and write the peak of the memory."""
    _end_with_parent()
    entry, *words = sys.argv[1:]
    sys.argv = ["pretrain_gpt.py", *words]
    import torch  # before Transformer Engine, which needs its libraries

    from benchmarks.one_gpu import fused_accumulation

    fused_accumulation.install()
    with contextlib.suppress(ImportError):
        importlib.import_module("transformer_engine.pytorch")
    if "megatron_hexi.cli" not in entry:
        for name in _TRAINING:
            importlib.import_module(name)
    if not sys.stdin.readline():
        return
    try:
        sys.exit(importlib.import_module(entry).main())
    finally:
        if torch.cuda.is_available():
            peak = {"peak_bytes": torch.cuda.max_memory_allocated()}
            Path(PEAK.format(rank=os.environ["RANK"])).write_text(json.dumps(peak))


def _end_with_parent() -> None:
    """Be killed when the process that started this one ends: ranks that wait for others keep the GPU busy."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, in linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
