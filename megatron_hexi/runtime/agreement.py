"""What ranks agree on before anything is sent, so that a mistake is an error and never a hang.

At set-up every rank posts the digest of its plan in the job's store, or what it found wrong; rank 0 compares
and answers. The store works before any process group does and knows which ranks never came. Before the first
message of a kind, the ranks of a domain compare the shapes that they are about to send.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.elastic.store import in_round, round_store
from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Workload
from megatron_hexi.plan.schedule import Schedule

#: What a rank without a plan posts.
NO_PLAN = ""

#: How long a rank that cannot go on waits for the others to come and hear why.
_TELL_TIMEOUT = timedelta(seconds=60)
#: How long rank 0, which may keep the store, waits for the others to read a bad answer.
_READ_TIMEOUT = timedelta(seconds=10)
#: The store outlives Megatron's groups: each time that ranks meet, they do so under another name.
_meetings = itertools.count()

#: What a rank answers whose tensors are not those of the plan.
_WRONG = (-1, -1)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def job_store(timeout: timedelta) -> dist.Store | None:
    """Where ranks of this job meet: the store of an elastic job, torch.distributed, torchrun or rank 0.

    It is at hand before process groups are. torch.distributed goes on with the same server later
    (``multi_tenant``).

    Args:
        timeout: how long to wait until the store is there.

    Returns:
        ``None`` in a job of one rank, or where the environment names no job.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    if in_round():
        store = round_store(timeout) if os.environ["WORLD_SIZE"] != "1" else None
    elif dist.is_initialized():
        store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        store = None
    else:
        keeper = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=keeper,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    return store


def meeting(store: dist.Store) -> dist.Store:
    """A part of the store that the ranks have not used yet."""
    return dist.PrefixStore(f"hexi-{next(_meetings)}", store)


def tell_problem(problem: str, code: int) -> None:
    """Tell the other ranks, in place of `agree_on_plan`, what this one found wrong; returns when they know.

    Says nothing itself, and gives up where the others do not come.

    Args:
        problem: one line.
        code: the exit code; that of a `PlanError`, by which the others end.
    """
    with contextlib.suppress(PlanError, RuntimeError):
        store = job_store(_TELL_TIMEOUT)
        if store is not None:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            agree_on_plan(meeting(store), rank, world_size, NO_PLAN, "", _TELL_TIMEOUT, problem)


def agree_on_plan(
    store: dist.Store,
    rank: int,
    world_size: int,
    digest: str,
    path: str,
    timeout: timedelta,
    problem: str = "",
) -> None:
    """Make sure that every rank of the job has the same plan, and that none has found a problem of its own.

    Args:
        store: where the ranks meet; used for nothing else.
        rank: this rank's number in the job.
        world_size: ranks of the job.
        digest: of this rank's plan; `NO_PLAN` if it has none.
        path: where this rank read it.
        timeout: how long to wait for the others.
        problem: why this rank cannot go on (a file that it cannot write, say); one line.

    Raises:
        PlanError: on every rank, naming those that have a problem or another plan, or never answered.
    """
    store.set(f"plan/{rank}", json.dumps([digest, path, socket.gethostname(), problem]))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size, timeout))
    try:
        # Rank 0 needs up to the whole time itself.
        store.wait(["verdict"], timeout + timedelta(seconds=30))
    except RuntimeError:
        raise PlanError(
            f"rank 0 did not answer within {timeout}; does every rank run the same command with --hexi-plan?"
        ) from None
    verdict = store.get("verdict").decode()
    if verdict:
        store.set(f"read/{rank}", "")
        if rank == 0:
            with contextlib.suppress(RuntimeError):  # those that never came do not read it either
                store.wait([f"read/{other}" for other in range(world_size)], _READ_TIMEOUT)
        raise PlanError(verdict)


def _verdict(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """What is wrong with the ranks or their plans; empty if nothing is."""
    keys = [f"plan/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"rank {_listed(silent)} never said which plan it has; start every rank with the same command "
            "and the same --hexi-plan"
        )
    answers = [json.loads(store.get(key)) for key in keys]
    for rank, (_, _, host, problem) in enumerate(answers):
        if problem:
            return f"rank {rank} on host {host}: {problem}"
    common, _ = Counter(digest for digest, *_ in answers).most_common(1)[0]
    odd = [
        f"rank {rank} on {host} has {f'{path} ({digest[:12]})' if digest else 'no plan'}"
        for rank, (digest, path, host, _) in enumerate(answers)
        if digest != common
    ]
    if not odd:
        return ""
    usual = next(path for digest, path, *_ in answers if digest == common)
    has = f"{usual} ({common[:12]})" if common else "no plan"
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return (
        f"ranks have different plans: {'; '.join(odd[:4])}{more}; the others have {has}; "
        "give all of them one file"
    )


def agree_on_shapes(
    workload: Workload,
    schedule: Schedule,
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    agreed: set[tuple[int, ...]],
) -> None:
    """Make sure that query, key and value are those of the plan, and of one kind on every rank.

    The ranks are asked once for each kind of tensor; a kind must appear on all of them at once.

    Args:
        workload: the model and sequence of the plan.
        schedule: this rank's split tables.
        tensors: query [T, B, H, D], key [T, B, K, D], value [T, B, K, Dv].
        group: the ranks of the domain.
        agreed: the kinds that all ranks agreed on so far; a new one is added.

    Raises:
        PlanError: with both shapes; where ranks differ, on every rank.
    """
    query = tensors[0]
    kind = (query.shape[1], _DTYPES.index(query.dtype))
    wrong = _unlike_plan(workload, schedule, tensors)
    if not wrong and kind in agreed:
        return
    if wrong and agreed:
        raise PlanError(wrong)
    # At first all ranks ask: one that is wrong still answers, so that none of them waits for it in vain.
    own = torch.tensor(_WRONG if wrong else kind, dtype=torch.int64, device=query.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    if wrong:
        raise PlanError(wrong)
    kinds = [tuple(other.tolist()) for other in everyone]
    if len(set(kinds)) > 1:
        said = ", ".join(
            f"rank {i}: {'not those of the plan' if (b, d) == _WRONG else f'batch {b} of {_DTYPES[d]}'}"
            for i, (b, d) in enumerate(kinds)
        )
        raise PlanError(
            f"the ranks of a domain are about to send different tensors ({said}); use one micro-batch size"
        )
    agreed.add(kind)


def _unlike_plan(workload: Workload, schedule: Schedule, tensors: Sequence[Tensor]) -> str:
    """How query, key and value differ from those of the plan; empty if they do not."""
    batch = tensors[0].shape[1]
    sizes = (
        ("query", workload.local_heads, workload.head_dim),
        ("key", workload.local_kv_heads, workload.head_dim),
        ("value", workload.local_kv_heads, workload.value_size),
    )
    for tensor, (name, heads, size) in zip(tensors, sizes, strict=True):
        expected = (schedule.tokens, batch, heads, size)
        if tuple(tensor.shape) != expected:
            return (
                f"{name} has the shape {list(tensor.shape)}, the plan says {list(expected)} "
                "(tokens, batch, heads, head_dim); was the plan made for this model?"
            )
    return ""


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text
