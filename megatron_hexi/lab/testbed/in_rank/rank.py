"""``python -m megatron_hexi.lab.testbed.in_rank.rank FOLDER JOB -m MODULE …``: an emulated device's rank.

torchrun starts it in place of the program; it takes its place in the lab, limits its memory, then becomes the
program.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_hexi.cluster import Device, read_cluster
from megatron_hexi.lab.testbed.isolation import enter, go_first
from megatron_hexi.lab.testbed.lab import JOB, Lab, Throttle, read_lab
from megatron_hexi.lab.testbed.network import rank_namespace
from megatron_hexi.text_file import write_text_atomically

_GIB = 2**30


def limit_memory(device: Device) -> int:
    """Limit this process's memory to the device's, on top of what it uses; return the limit, bytes.

    Call it when torch is imported, and before the job: code and libraries lie outside a device's memory.
    """
    limit = _data_bytes() + round(device.usable_gib * _GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def is_out_of_memory(problem: BaseException) -> bool:
    """Return whether an exception is a failed allocation. torch raises a plain RuntimeError on the CPU."""
    return isinstance(problem, MemoryError) or "can't allocate memory" in str(problem)


def _data_bytes() -> int:
    """Return the private writable memory of this process, bytes, as `RLIMIT_DATA` counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: Sequence[str]) -> None:
    """Run the program under this rank's limits and pace.

    Args:
        argv: the run folder, the job's name, and the program as torchrun takes it.
    """
    lab, job, program = read_lab(argv[0]), argv[1], argv[2:]
    rank = int(os.environ["RANK"])
    gpu = read_cluster(lab.cluster).ranks[lab.gpus[rank]]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    log = os.open(lab.log(job, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    go_first(lab)
    if lab.links:
        enter(rank_namespace(gpu.rank))
    if lab.quotas:
        quota = lab.quotas[gpu.rank]
        (Path(quota.cgroup) / "cgroup.procs").write_text("0")  # 0: this process, in any PID namespace
        os.sched_setaffinity(0, {quota.core})
    throttles = [throttle for throttle in lab.throttles if throttle.gpu == gpu.rank and job == JOB]
    _run(lab, lab.record(job, rank), gpu.device, program, throttles)


def _run(
    lab: Lab, record_path: Path, device: Device, program: Sequence[str], throttles: Sequence[Throttle]
) -> None:
    import torch  # noqa: F401  (the program's memory begins after it)

    from megatron_hexi.lab.testbed.in_rank.charge import Charger, PacedClock, Pacing

    record: dict[str, Any] = {"memory_limit": limit_memory(device), "exit_code": 0}
    clock = PacedClock()
    try:
        with ExitStack() as stack:
            if lab.speeds == "paced":
                stack.enter_context(Pacing(Charger(device), clock, throttles))
            _become(program)
    except BaseException as problem:
        if isinstance(problem, SystemExit):
            code = problem.code
            record["exit_code"] = code if isinstance(code, int) else int(code is not None)
        else:
            record |= {"exit_code": 1, "out_of_memory": is_out_of_memory(problem)}
        raise
    finally:
        record |= {"ended": time.time(), "pace": asdict(clock.finish())}
        write_text_atomically(record_path, json.dumps(record))


def _become(program: Sequence[str]) -> None:
    """Run ``-m MODULE …`` or ``SCRIPT …`` as Python itself would."""
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
