"""Let ranks compare plans, errors and tensor shapes before they exchange tensors.

A mistake is then an error and never a hang. At set-up every rank posts the digest of its plan, or its error,
in the job's store; rank 0 compares them and posts a verdict. The store works before any process group exists,
and shows which ranks never came. Before the first exchange of a new kind of tensors, the ranks of a domain
compare the shapes that they are about to send.
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
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.workload import Workload
from megatron_hexi.spelling import first_few

#: Digest that a rank without a plan posts.
NO_PLAN = ""

#: Time for which a rank with an error waits for the other ranks to read the error.
_TELL_TIMEOUT = timedelta(seconds=60)
#: Time for which rank 0, which may host the store, waits for the other ranks to read a bad verdict.
_READ_TIMEOUT = timedelta(seconds=10)
#: Numbers of agreements: each uses another prefix of the store, which outlives Megatron's process groups.
_meetings = itertools.count()

#: Value that a rank sends in place of shapes if its tensors do not fit the plan.
_WRONG = (-1, -1)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def job_store(timeout: timedelta) -> dist.Store | None:
    """Return the key-value store of the job, served by an elastic job, torch.distributed, torchrun or rank 0.

    The store is available before process groups. torch.distributed uses the same server later
    (``multi_tenant``).

    Returns:
        The store; ``None`` in a job of one rank, or if the environment describes no job.

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
    """Return the store with a key prefix that the ranks have not used yet."""
    return dist.PrefixStore(f"hexi-{next(_meetings)}", store)


def tell_problem(problem: str, code: int) -> None:
    """Post this rank's error in place of `agree_on_plan`, and return when the other ranks have read it.

    The function prints nothing, and gives up if the other ranks do not come.

    Args:
        code: exit code of the `PlanError` that the other ranks raise.
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
    """Check that every rank of the job has the same plan, and that no rank has an error.

    Args:
        store: the job's store with a prefix that is used for nothing else.
        digest: digest of this rank's plan; `NO_PLAN` without a plan.
        problem: this rank's error message, one line, such as a file that it cannot write; empty without one.

    Raises:
        PlanError: some ranks have an error or another plan, or never answered; raised on every rank, with
            the numbers of these ranks.
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
                store.wait([f"read/{reader}" for reader in range(world_size)], _READ_TIMEOUT)
        raise PlanError(verdict)


def _verdict(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """Return an error message if ranks have errors or different plans, or never answered; else ``""``."""
    keys = [f"plan/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"rank {first_few(silent)} never said which plan it has; start every rank with the same command "
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
    """Check that query, key and value fit the plan, and have the same kind on all ranks of the domain.

    A kind of tensors is their batch size and type. Ranks compare each new kind once, and must all begin to
    use it at the same time.

    Args:
        tensors: query [T, B, H, D], key [T, B, K, D] and value [T, B, K, Dv]; with exchanged latent columns,
            query, latent columns [T, B, 1, C] and rotary columns [T, B, 1, R].
        agreed: kinds on which all ranks agreed before; a new kind is added.

    Raises:
        PlanError: the tensors do not fit the plan, or differ between ranks, in which case every rank raises;
            the message has both shapes.
    """
    query = tensors[0]
    kind = (query.shape[1], _DTYPES.index(query.dtype))
    wrong = _unlike_plan(workload, schedule, tensors)
    if not wrong and kind in agreed:
        return
    if wrong and agreed:
        raise PlanError(wrong)
    # The first time all ranks take part, also one with wrong tensors, so that none waits for it in vain.
    answer = torch.tensor(_WRONG if wrong else kind, dtype=torch.int64, device=query.device)
    everyone = [torch.empty_like(answer) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, answer, group=group)
    if wrong:
        raise PlanError(wrong)
    kinds = [tuple(gathered.tolist()) for gathered in everyone]
    if len(set(kinds)) > 1:
        answers = ", ".join(
            f"rank {i}: {'not those of the plan' if (b, d) == _WRONG else f'batch {b} of {_DTYPES[d]}'}"
            for i, (b, d) in enumerate(kinds)
        )
        raise PlanError(
            f"the ranks of a domain are about to send different tensors ({answers}); use one micro-batch size"
        )
    agreed.add(kind)


def _unlike_plan(workload: Workload, schedule: Schedule, tensors: Sequence[Tensor]) -> str:
    """Return an error text about query, key and value that do not fit the plan; empty if they fit."""
    batch = tensors[0].shape[1]
    names = ("latent columns", "rotary columns") if workload.latent_exchange else ("key", "value")
    sizes = (
        ("query", workload.local_heads, workload.head_dim),
        *zip(names, [workload.local_kv_heads] * 2, workload.exchanged_sizes, strict=True),
    )
    for tensor, (name, heads, size) in zip(tensors, sizes, strict=True):
        expected = (schedule.tokens, batch, heads, size)
        if tuple(tensor.shape) != expected:
            return (
                f"{name} has the shape {list(tensor.shape)}, but the plan says {list(expected)} "
                "(tokens, batch, heads, head_dim); was the plan made for this model?"
            )
    return ""
