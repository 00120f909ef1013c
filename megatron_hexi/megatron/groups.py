"""Process groups of the plan, made after Megatron's own.

Megatron's groups stay as they are: uneven shards need no other ranks in them. Megatron cannot express A2A
groups, of unequal size inside one domain, nor the domains of unequal replicas. These replicas form one
context-parallel group of all ranks, and one data-parallel group of the same ranks: so gradients, tokens and
losses are summed over all of them, which is right for any assignment of sequences and tokens to ranks.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.elastic.store import in_round, round_store, store_gate
from megatron_hexi.errors import PlanError, set_fault_listener, user_errors
from megatron_hexi.megatron.process_groups import GroupOptions
from megatron_hexi.megatron.session import (
    GivenPlan,
    Session,
    given_plan,
    local_shard,
    set_active_session,
    set_given_plan,
)
from megatron_hexi.megatron.stages.mesh_groups import MeshGroups
from megatron_hexi.megatron.stages.stages_session import start_stages_session
from megatron_hexi.patching import Patch
from megatron_hexi.plan import Schedules
from megatron_hexi.plan.units import domain_rows
from megatron_hexi.runtime import (
    NO_PLAN,
    DomainAttention,
    agree_on_plan,
    job_store,
    meeting,
    start_watch,
    stop_watch,
)

#: The job's store, kept alive: it may end with the last reference to it.
_store: dist.Store | None = None


def group_patches(device: torch.device) -> tuple[Patch, ...]:
    """Return the patches that make and drop the plan's groups."""
    return (
        Patch(
            target="megatron.training.initialize:_initialize_distributed",
            why="agrees on the plan with all ranks before any process group is made",
            build=_with_agreement,
        ),
        Patch(
            target="megatron.core.parallel_state:initialize_model_parallel",
            why="makes the plan's A2A groups",
            build=functools.partial(_with_plan_groups, device=device),
        ),
        Patch(
            target="megatron.core.parallel_state:destroy_model_parallel",
            why="drops what was derived from the plan together with Megatron's groups",
            build=_with_plan_dropped,
            parameters=(),
        ),
    )


def start_session(given: GivenPlan, device: torch.device, options: GroupOptions) -> Session:
    """Return this rank's session: its groups and split tables, made after Megatron's own groups.

    Raises:
        PlanError: Megatron's groups are not those that the plan was checked for.
    """
    from megatron.core import parallel_state

    all_replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rank, job_ranks = dist.get_rank(all_replicas), dist.get_process_group_ranks(all_replicas)
    if len(job_ranks) != given.plan.units:
        raise PlanError(
            f"{given.path}: the plan has {given.plan.units} members, Megatron's data-and-context-parallel "
            f"group {len(job_ranks)} ranks; make the two equal"
        )
    rows = domain_rows(given.plan)
    domains = [row.domain for row in rows]
    ranks = [[member.number for member in domain.members] for domain in domains]
    replica = next(number for number, replica_ranks in enumerate(ranks) if rank in replica_ranks)
    index = ranks[replica].index(rank)
    parts = given.plan.exchange.parts
    schedules = Schedules(given.plan.workload, domains[replica], index, parts, rows[replica].rates)
    schedule = schedules()
    domain_ranks = [job_ranks[member] for member in ranks[replica]]
    domain_group = parallel_state.get_context_parallel_group()
    if given.shares is not None:
        domain_group = options.make(domain_ranks, "HEXI_DOMAIN_GROUP")
    a2a_group = options.make([domain_ranks[member] for member in schedule.members], "HEXI_A2A_GROUP")
    assert dist.get_process_group_ranks(domain_group) == domain_ranks, "the plan was checked for these groups"
    attention = DomainAttention(
        given.plan.workload,
        schedules,
        domain_group,
        a2a_group,
        window=given.plan.exchange.window,
        kernel_name=given.kernel,
    )
    attention.connect(device)
    shard = local_shard(schedule, given.row_multiple, device)
    share = given.shares[replica] if given.shares else None
    return Session(given, attention, shard, share, replica=replica)


def _with_agreement(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args

    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_distributed(*args: Any, **kwargs: Any) -> Any:
        if not in_round():
            set_fault_listener(None)  # the agreement reports errors to all ranks itself
        call, job = signature.bind(*args, **kwargs), get_args()
        store, timeout = call.arguments.get("store"), timedelta(minutes=job.distributed_timeout_minutes)
        # One process stands for all in a fake group, which not every version has.
        if not getattr(job, "fake_process_group", False):
            with user_errors():
                agree(given_plan(), job.rank, job.world_size, timeout, store)
        if in_round() and store is None:
            # Else rank 0 would open a store of torch's own, to whoever reaches its node.
            call.arguments["store"] = dist.PrefixStore("torch", round_store(timeout))
        return original(*call.args, **call.kwargs)

    return initialize_distributed


def agree(
    given: GivenPlan | None,
    rank: int,
    world_size: int,
    timeout: timedelta,
    store: dist.Store | None = None,
    mistake: str = "",
) -> None:
    """Agree on the plan before ranks make groups, then watch each other.

    Args:
        mistake: this rank's error message; empty without one.

    Raises:
        PlanError: some ranks have an error or another plan; raised on every rank.
    """
    global _store
    try:
        _store = job_store(timeout) if store is None else store
    except RuntimeError as problem:
        if gate := store_gate():
            raise PlanError(
                f"no connection to the job's store at --rdzv-endpoint {gate} within {timeout} "
                f"({str(problem).splitlines()[0]}); is a node or --keep-store running there?"
            ) from None
        raise PlanError(
            f"no connection to rank 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{timeout} ({str(problem).splitlines()[0]}); does rank 0 run, and is its port open?"
        ) from None
    if _store is None:
        if mistake:
            raise PlanError(mistake)
        return
    digest, path = (given.digest, given.path) if given else (NO_PLAN, "")
    agree_on_plan(meeting(_store), rank, world_size, digest, path, timeout, mistake)
    if given is not None and not in_round():  # a round's ranks are watched since they got their numbers
        start_watch(meeting(_store), rank, world_size)


def _with_plan_groups(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        given = given_plan()
        if given is None:
            return original(*args, **kwargs)
        with user_errors():
            _refuse_bound_device()
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options = GroupOptions.of_call(call.arguments)
        if given.mesh is None:
            original(*args, **kwargs)
        with user_errors():
            if given.mesh is None:
                session = start_session(given, device, options)
            else:
                groups = MeshGroups(dist.get_rank(), options)
                session = start_stages_session(given, given.mesh, groups, device)
            set_active_session(session)
            _announce(given)

    return initialize_model_parallel


def _with_plan_dropped(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        set_active_session(None)
        set_given_plan(None)
        stop_watch()
        original()

    return destroy_model_parallel


def _refuse_bound_device() -> None:
    """Refuse a default group for which NCCL would split off the plan's groups: a split needs all ranks."""
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    if bound is not None:
        raise PlanError(
            f"torch.distributed is bound to the device {bound}, from which groups of some ranks cannot be "
            "made; call init_process_group without device_id"
        )


def _announce(given: GivenPlan) -> None:
    if dist.get_rank() != 0:
        return
    replicas = given.plan.replicas
    if given.mesh is not None:
        print(
            f"hexi: plan {given.path} ({given.digest[:12]}): replicas of "
            f"{', '.join(str(len(replica.stages)) for replica in replicas)} stages on {given.plan.ranks} "
            f"ranks; attention kernel {given.kernel}",
            file=sys.stderr,
            flush=True,
        )
        return
    groups = [" + ".join(str(len(group.members)) for group in replica.domain.groups) for replica in replicas]
    if given.shares is None:
        ranks = f"{len(replicas)} x {len(replicas[0].domain.members)} ranks in groups of {'; '.join(groups)}"
    else:
        sizes = ", ".join(str(len(replica.domain.members)) for replica in replicas)
        counts = ", ".join(str(share.count) for share in given.shares)
        ranks = (
            f"unequal replicas of {sizes} ranks in groups of {'; '.join(groups)}, which take {counts} of "
            f"{given.shares[0].total} micro-batches"
        )
    print(
        f"hexi: plan {given.path} ({given.digest[:12]}): {ranks}; attention kernel {given.kernel}",
        file=sys.stderr,
        flush=True,
    )
