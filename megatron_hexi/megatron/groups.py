"""Process groups: after Megatron has made its own, those of the plan.

Megatron's groups stay as they are: uneven shards need no other ranks in them. What it cannot express
are the A2A groups, of unequal size inside one context-parallel group.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.errors import PlanError, user_errors
from megatron_hexi.megatron.session import (
    GivenPlan,
    Session,
    given_plan,
    local_shard,
    set_active_session,
    set_given_plan,
)
from megatron_hexi.patching import Patch
from megatron_hexi.plan import Schedules
from megatron_hexi.runtime import NO_PLAN, DomainAttention, agree_on_plan

#: Ranks import Megatron and read their plan before this; minutes apart only where something is wrong.
_AGREEMENT_TIMEOUT = timedelta(seconds=60)

#: The store outlives Megatron's groups: each time they are made, the ranks agree under another name.
_agreements = itertools.count()


def group_patches(device: torch.device) -> tuple[Patch, ...]:
    """The patches that make and drop the plan's groups."""
    return (
        Patch(
            target="megatron.core.parallel_state:initialize_model_parallel",
            why="agrees on the plan with all ranks and makes its A2A groups",
            build=functools.partial(_with_plan_groups, device=device),
        ),
        Patch(
            target="megatron.core.parallel_state:destroy_model_parallel",
            why="drops what was derived from the plan together with Megatron's groups",
            build=_with_plan_dropped,
            parameters=(),
        ),
    )


def start_session(given: GivenPlan, device: torch.device) -> Session:
    """Make this rank's groups and split tables; Megatron's own groups exist already.

    Raises:
        PlanError: Megatron's groups are not those that the plan was checked for.
    """
    from megatron.core import parallel_state

    domain_group = parallel_state.get_context_parallel_group()
    replica = parallel_state.get_data_parallel_rank()
    index = dist.get_rank(domain_group)
    domain = given.plan.replicas[replica].domain
    if dist.get_world_size(domain_group) != len(domain.members):
        raise PlanError(
            f"{given.path}: replica {replica} has {len(domain.members)} ranks, Megatron's context-parallel "
            f"group {dist.get_world_size(domain_group)}; make the two equal"
        )
    schedules = Schedules(given.plan.workload, domain, index, given.plan.exchange.parts)
    schedule = schedules()
    job_ranks = dist.get_process_group_ranks(domain_group)
    # Groups of different size cannot be made by all ranks in one order, so each is made by its members
    # alone. A rank that is alone makes one too: torch names groups by how many a process has made, and
    # with unequal counts the next group that ranks make together would hang.
    a2a_group = dist.new_group(
        [job_ranks[i] for i in schedule.members],
        use_local_synchronization=True,
        group_desc="HEXI_A2A_GROUP",
    )
    assert isinstance(a2a_group, dist.ProcessGroup), "this rank is a member"
    attention = DomainAttention(
        given.plan.workload,
        schedules,
        domain_group,
        a2a_group,
        window=given.plan.exchange.window,
        kernel_name=given.kernel,
    )
    return Session(given, attention, local_shard(schedule, given.row_multiple, device))


def _with_plan_groups(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        given = given_plan()
        with user_errors():
            # First of all: ranks with different plans would already make different groups of Megatron's.
            _agree(given)
        original(*args, **kwargs)
        with user_errors():
            if given is not None:
                set_active_session(start_session(given, device))
                _announce(given)

    return initialize_model_parallel


def _with_plan_dropped(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        set_active_session(None)
        set_given_plan(None)
        original()

    return destroy_model_parallel


def _agree(given: GivenPlan | None) -> None:
    agree_on_plan(
        dist.PrefixStore(f"hexi-{next(_agreements)}", dist.distributed_c10d._get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
        given.digest if given else NO_PLAN,
        given.path if given else "",
        _AGREEMENT_TIMEOUT,
    )


def _announce(given: GivenPlan) -> None:
    if dist.get_rank() != 0:
        return
    groups = "; ".join(
        " + ".join(str(len(group.members)) for group in replica.domain.groups)
        for replica in given.plan.replicas
    )
    print(
        f"hexi: plan {given.path} ({given.digest[:12]}): {len(given.plan.replicas)} x "
        f"{len(given.plan.replicas[0].domain.members)} ranks in groups of {groups}; "
        f"attention kernel {given.kernel}",
        file=sys.stderr,
        flush=True,
    )
