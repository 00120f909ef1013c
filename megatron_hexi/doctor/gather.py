"""The facts of all ranks, brought to rank 0 through the job's store.

The store works before any process group does, on a machine whose NCCL or gloo is what is wrong, and it knows
which ranks never came: nothing here waits longer than it was told to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.errors import HexiError

if TYPE_CHECKING:
    from torch.distributed import Store

#: How long rank 0 lingers so that the others can read its answer, where it is rank 0 that serves the store.
_PARTING_S = 10.0

_HEALTHY = "healthy"


@dataclass(frozen=True)
class Job:
    """Where this process stands in a job of several.

    Attributes:
        rank: its number.
        size: how many there are.
        address: host that serves the store.
        port: its port.
        served: whether the launcher serves the store already (torchrun does); else rank 0 does.
        attempt: which start of the job this is, counted by torchrun.
    """

    rank: int
    size: int
    address: str
    port: int
    served: bool
    attempt: str = "0"


def find_job(environment: Mapping[str, str]) -> Job | None:
    """The job that a launcher started this process for; ``None`` where it runs alone.

    Args:
        environment: variables of torchrun, or what was derived from SLURM's.

    Raises:
        HexiError: the variables contradict each other.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = environment.get(name, "")
        if not (text.isascii() and text.isdecimal()):
            raise HexiError(f"{name}={text}: no number; start with torchrun or srun, or give --local")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise HexiError(
            f"RANK={numbers['RANK']} with WORLD_SIZE={numbers['WORLD_SIZE']}: there is no such rank; "
            "start with torchrun or srun, or give --local"
        )
    if numbers["WORLD_SIZE"] == 1:
        return None
    address = environment.get("MASTER_ADDR")
    if not address:
        raise HexiError("MASTER_ADDR is not set; start with torchrun or srun, or give --local")
    return Job(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        address,
        numbers["MASTER_PORT"],
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@contextlib.contextmanager
def joined(job: Job, timeout_s: float) -> Iterator[Store]:
    """The job's store, while this process takes part.

    Args:
        job: where this process stands.
        timeout_s: how long to wait for the store to be there.

    Raises:
        HexiError: it cannot be reached, or served.
    """
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
        said = str(problem).splitlines()[0].rstrip(".")
        raise HexiError(
            f"{job.address}:{job.port} {'cannot be served' if serves else 'cannot be reached'} ({said}); "
            "does rank 0 run there, and is the port open?"
        ) from None
    yield dist.PrefixStore(f"hexi-doctor-{job.attempt}", store)


def send_facts(store: Store, facts: Facts, timeout_s: float) -> bool:
    """Give this rank's facts to rank 0, and wait for its verdict.

    Args:
        store: the job's.
        facts: of this rank.
        timeout_s: how long rank 0 may take.

    Returns:
        Whether the job is healthy.

    Raises:
        HexiError: rank 0 did not answer.
    """
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


def receive_facts(store: Store, job: Job, own: Facts, timeout_s: float) -> tuple[list[Facts], list[int]]:
    """On rank 0: the facts of all ranks that answer in time, in rank order, and the ranks that do not.

    Args:
        store: the job's.
        job: for its size.
        own: rank 0's facts.
        timeout_s: how long to wait for all others together.
    """
    deadline = time.monotonic() + timeout_s
    found, silent = [own], []
    for rank in range(1, job.size):
        key = f"facts/{rank}"
        left = max(deadline - time.monotonic(), 0.05)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            silent.append(rank)
            continue
        found.append(_read(store.get(key), rank))
    return found, silent


def _read(text: bytes, rank: int) -> Facts:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Facts).validate_json(text)
    except ValidationError:
        # No version of its own is among these facts, so the ranks do not agree on it either.
        unknown = (("what it sent", "another version of megatron-hexi writes facts differently"),)
        return Facts(f"host of rank {rank}", rank, python="unknown", executable="unknown", unknown=unknown)


def answer(store: Store, job: Job, answered: int, *, healthy: bool) -> None:
    """On rank 0: tell the others, and let them read it before the store goes.

    Args:
        store: the job's.
        job: this one.
        answered: the ranks that gave facts, this one too.
        healthy: the verdict.
    """
    store.set("verdict", _HEALTHY if healthy else "ill")
    deadline = time.monotonic() + _PARTING_S
    while store.add("read", 0) < answered - 1 and time.monotonic() < deadline:
        time.sleep(0.02)


def adopt_launcher() -> None:
    """Derive torch.distributed's variables from SLURM's, where srun is the launcher.

    Raises:
        HexiError: SLURM's variables name no host.
        ImportError: torch is missing.
    """
    from megatron_hexi.platform.slurm import adopt_slurm_environment

    adopt_slurm_environment(os.environ)
