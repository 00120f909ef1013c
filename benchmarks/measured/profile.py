"""Profile one iteration of training: how much of it each rank waits for messages of attention, and others.

    hexi testbed run CLUSTER.yaml -- -m benchmarks.measured.profile TRACES -- [arguments of pretrain_gpt]

Writes a trace of torch's profiler a rank into the folder TRACES (for https://ui.perfetto.dev), and a summary.
Pacing sleeps between operations; a trace shows these as gaps.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

#: Which call of Megatron's train_step is looked at: buffers and connections are there by then.
_STEP = 3


def main() -> None:
    """Train by the command line, and profile one iteration."""
    folder, dash, *words = sys.argv[1:]
    assert dash == "--", "write -- between the folder and the training's arguments"
    sys.argv = [sys.argv[0], *words]
    import megatron_hexi.adaptor  # noqa: F401  (before Megatron)

    import torch.distributed as dist  # isort: skip
    from megatron.training import training  # isort: skip
    from megatron_hexi.megatron.gpt import pretrain_from_command_line  # isort: skip
    from megatron_hexi.runtime import wire  # isort: skip

    waited: Counter[str] = Counter()
    step = _Step(training.train_step, Path(folder), waited)
    with (
        mock.patch.object(training, "train_step", step),
        mock.patch.object(wire.Transfers, "wait", _counted(wire.Transfers.wait, "attention", waited)),
        mock.patch.object(dist, "all_reduce", _counted(dist.all_reduce, "other collectives", waited)),
    ):
        pretrain_from_command_line()


class _Step:
    """Megatron's train_step; one call of it is profiled."""

    def __init__(self, original: Callable[..., Any], folder: Path, waited: Counter[str]) -> None:
        self._original, self._folder, self._waited = original, folder, waited
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        self._calls += 1
        if self._calls != _STEP:
            return self._original(*args, **kwargs)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._waited.clear()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            begin = time.perf_counter()
            result = self._original(*args, **kwargs)
            seconds = time.perf_counter() - begin
        found.export_chrome_trace(str(self._folder / f"rank-{dist.get_rank()}.json"))
        shares = {name: waiting / seconds for name, waiting in self._waited.items()}
        summary = {"rank": dist.get_rank(), "iteration_s": seconds, "waits": shares}
        (self._folder / f"summary-{dist.get_rank()}.json").write_text(json.dumps(summary))
        return result


def _counted(original: Callable[..., Any], name: str, waited: Counter[str]) -> Callable[..., Any]:
    from torch.profiler import record_function

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        with record_function(f"wait: {name}"):
            result = original(*args, **kwargs)
        waited[name] += time.perf_counter() - begin  # type: ignore[assignment]
        return result

    return run


if __name__ == "__main__":
    main()
