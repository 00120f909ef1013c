"""Collect the facts about this process part by part, and send those of all ranks to rank 0.

The store works before any process group, also where NCCL or gloo do not, and tells which ranks never came:
nothing here waits longer than its time-out.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_hexi.doctor import machine, software
from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.findings import Problem, healthy
from megatron_hexi.doctor.rules import find_job_problems
from megatron_hexi.errors import HexiError
from megatron_hexi.whole_number import variable_number, whole_number

if TYPE_CHECKING:
    from torch.distributed import Store

#: Callback: receives the part being examined, the number of parts done, and their total.
Progress = Callable[[str, int, int], None]

_PARTS: dict[str, Callable[[], Any]] = {
    "packages": software.find_packages,
    "torch": software.find_torch,
    "driver": software.find_driver,
    "gpus": software.find_gpus,
    "gpu_states": machine.find_gpu_states,
    "gpu_links": machine.find_gpu_links,
    "cpu": machine.find_cpu,
    "nccl_plugins": machine.find_nccl_plugins,
    "kernels": software.find_kernels,
    "triton_lacks": software.find_triton,
    "patches": software.find_patches,
    "network": machine.find_network,
    "limits": machine.find_limits,
}


def collect(rank: int | None, checkout: Checkout | None = None, progress: Progress | None = None) -> Facts:
    """Return the facts about this machine and this process."""
    parts: dict[str, Any] = {}
    unknown: list[tuple[str, str]] = []
    for done, (name, find) in enumerate(_PARTS.items()):
        if progress is not None:
            progress(f"looking at {name}", done, len(_PARTS))
        try:
            with _quiet(), _uncompiled():
                parts[name] = find()
        except Exception as problem:  # whatever a broken installation raises is a finding
            line = (str(problem).strip() or "no message").splitlines()[0]
            kind = "" if isinstance(problem, HexiError) else f"{type(problem).__name__}: "
            unknown.append((name, f"{kind}{line}"))
    return Facts(
        host=socket.gethostname(),
        rank=rank,
        python=platform.python_version(),
        executable=sys.executable,
        checkout=checkout,
        environment=machine.find_environment(os.environ),
        unknown=tuple(unknown),
        **parts,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what libraries print at import: rules report what matters of it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Skip torch's compiler at import, which takes as long as all the rest; nothing is run here.

    Megatron and our attention layer mark functions for compilation at import.
    """
    try:
        import torch
    except Exception:  # `find_packages` reports it
        yield
        return
    compiled, disabled = torch.compile, torch.compiler.disable
    setattr(torch, "compile", _as_it_is)  # noqa: B010 (mypy would ask for the same overloads)
    setattr(torch.compiler, "disable", _as_it_is)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "compile", compiled)  # noqa: B010
        setattr(torch.compiler, "disable", disabled)  # noqa: B010


def _as_it_is(function: Any = None, *_: Any, **options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


#: Time that rank 0 leaves the others to read its answer, where it hosts the store.
_PARTING_S = 10.0

_HEALTHY = "healthy"


@dataclass(frozen=True)
class LaunchedJob:
    """The job of this process, and its rank in it.

    Attributes:
        served: whether the launcher serves the store (torchrun does); else rank 0 does.
    """

    rank: int
    size: int
    address: str
    port: int
    served: bool
    attempt: str = "0"


def find_job(environment: Mapping[str, str]) -> LaunchedJob | None:
    """Return the job for which a launcher started this process; ``None`` where it runs alone."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    size = variable_number(environment, "WORLD_SIZE", least=1)
    rank = variable_number(environment, "RANK", 0 if size == 1 else None, most=size - 1)
    if size == 1:
        return None
    address = environment.get("MASTER_ADDR")
    if not address:
        raise HexiError("MASTER_ADDR is not set; start with torchrun or srun, which set it")
    port = variable_number(environment, "MASTER_PORT", least=1, most=2**16 - 1)
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedJob(rank, size, address, port, served, attempt)


@contextlib.contextmanager
def joined(job: LaunchedJob, timeout_s: float) -> Iterator[Store]:
    """Yield the job's store, with this rank joined to it."""
    import torch.distributed as dist

    serves = job.rank == 0 and not job.served
    limit = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            job.address,
            job.port,
            is_master=serves,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=serves,
        )
    except RuntimeError as problem:
        line = str(problem).splitlines()[0].rstrip(".")
        raise HexiError(
            f"{job.address}:{job.port} {'cannot be served' if serves else 'cannot be reached'} ({line}); "
            "does rank 0 run there, and is the port open?"
        ) from None
    yield dist.PrefixStore(f"hexi-doctor-{job.attempt}", store)


def send_facts(store: Store, facts: Facts, timeout_s: float) -> bool:
    """Send this rank's facts to rank 0, and return its verdict: whether the job is healthy."""
    from pydantic import TypeAdapter

    try:
        store.set(f"facts/{facts.rank}", TypeAdapter(Facts).dump_json(facts).decode())
        store.wait(["verdict"], timedelta(seconds=timeout_s))
        verdict = store.get("verdict").decode()
        store.add("read", 1)
    except RuntimeError:
        raise HexiError(
            f"rank 0 ended, or did not answer within {timeout_s:g} s; see its log, or raise --timeout"
        ) from None
    return verdict == _HEALTHY


def receive_facts(
    store: Store, job: LaunchedJob, local_facts: Facts, timeout_s: float
) -> tuple[list[Facts], list[int]]:
    """Return, on rank 0, the facts of all ranks that answer in time, in order, and the silent ranks."""
    deadline = time.monotonic() + timeout_s
    facts, silent = [local_facts], []
    for rank in range(1, job.size):
        key = f"facts/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.05)))
        except RuntimeError:
            silent.append(rank)
        else:
            facts.append(_read(store.get(key), rank))
    return facts, silent


def _read(text: bytes, rank: int) -> Facts:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Facts).validate_json(text)
    except ValidationError:
        # These facts have no version of megatron-hexi, so it differs from that of the others too.
        unknown = (("what it sent", "another version of megatron-hexi writes facts differently"),)
        return Facts(f"host of rank {rank}", rank, python="unknown", executable="unknown", unknown=unknown)


def answer(store: Store, job: LaunchedJob, answered: int, *, healthy: bool) -> None:
    """Send the verdict to the other ranks, from rank 0, and wait some seconds for them to read it."""
    store.set("verdict", _HEALTHY if healthy else "ill")
    deadline = time.monotonic() + _PARTING_S
    while store.add("read", 0) < answered - 1 and time.monotonic() < deadline:
        time.sleep(0.02)


@dataclass(frozen=True)
class Examination:
    """The result of an examination.

    Attributes:
        facts: facts of the ranks that answered, in rank order; empty on all ranks but the first.
        problems: problems, the worst first; likewise.
    """

    facts: Sequence[Facts]
    problems: Sequence[Problem]
    healthy: bool


def launched_job() -> LaunchedJob | None:
    """Return the job of several ranks for which torchrun or srun started this process, if any."""
    # An error of the store is one line, without torch's C++ stack; torch reads this variable at import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from megatron_hexi.platform.slurm import adopt_slurm_environment
    except ImportError:
        return None  # without torch there is no store: every rank reports by itself
    adopt_slurm_environment(os.environ)
    return find_job(os.environ)


def examine(
    job: LaunchedJob | None, checkout: Checkout | None, timeout_s: float, progress: Progress | None = None
) -> Examination:
    """Examine this process, and the other ranks of its job.

    Args:
        job: the job of `launched_job`; ``None`` to examine this process only.
        timeout_s: time for which rank 0 waits for the others, and they for rank 0.
    """
    if job is None:
        facts = [collect(whole_number(os.environ.get("RANK", "")), checkout, progress)]
        problems = find_job_problems(facts)
        return Examination(facts, problems, healthy(problems))
    local_facts = collect(job.rank, checkout, progress)
    with joined(job, timeout_s) as store:
        if job.rank != 0:
            return Examination((), (), send_facts(store, local_facts, 2 * timeout_s))
        facts, silent = receive_facts(store, job, local_facts, timeout_s)
        problems = find_job_problems(facts, silent)
        verdict = healthy(problems)
        answer(store, job, len(facts), healthy=verdict)
    return Examination(facts, problems, verdict)
