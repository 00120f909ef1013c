"""Process groups: after Megatron has made its own, those of the plan.

Megatron's groups stay as they are: uneven shards need no other ranks in them. What it cannot express
are the A2A groups, of unequal size inside one domain, and the domains of unequal replicas. Those lie in one
context-parallel group of all ranks, and one data-parallel group of the same: so gradients, tokens and losses
are summed over all of them, which is right for any map of sequences and tokens to ranks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import yaml

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
from megatron_hexi.runtime import NO_PLAN, DomainAttention, agree_on_plan, start_watch, stop_watch
from megatron_hexi.text_file import read_text

#: Ranks import Megatron and read their plan before this; minutes apart only where something is wrong.
_AGREEMENT_TIMEOUT = timedelta(seconds=60)

#: The store outlives Megatron's groups: each time they are made, the ranks meet under other names.
_names = itertools.count()
#: Megatron's name for the groups that exchange keys and values, in its options of NCCL.
_CONTEXT_PARALLEL = "cp"


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


@dataclass(frozen=True)
class GroupOptions:
    """What Megatron gives to each process group that it makes, and we to those of the plan.

    Args:
        timeout: of a collective.
        communicators: options of NCCL's communicators by Megatron's names for groups, of the file given by
            ``--nccl-communicator-config-path``. Those of `cp` hold for the plan's groups.
    """

    timeout: timedelta
    communicators: dict[str, dict[str, Any]]

    @classmethod
    def of_call(cls, call: dict[str, Any]) -> GroupOptions:
        """From the arguments of ``initialize_model_parallel``."""
        path = call["nccl_communicator_config_path"]
        communicators = {} if path is None else yaml.safe_load(read_text(path))
        if _CONTEXT_PARALLEL in (call["high_priority_stream_groups"] or ()):
            own = communicators.get(_CONTEXT_PARALLEL, {})
            communicators = {**communicators, _CONTEXT_PARALLEL: {**own, "is_high_priority_stream": True}}
        return cls(timedelta(minutes=call["distributed_timeout_minutes"]), communicators)

    def make(self, ranks: list[int], name: str) -> dist.ProcessGroup:
        """A group that this rank belongs to, on Megatron's list of groups.

        Groups of different size cannot be made by all ranks in one order, so each is made by its members
        alone. A rank that is alone makes one too: torch names groups by how many a process has made, and with
        unequal counts the next group that ranks make together would hang.
        """
        from megatron.core import parallel_state

        group = parallel_state.create_group(
            ranks,
            timeout=self.timeout,
            pg_options=parallel_state.get_nccl_options(_CONTEXT_PARALLEL, self.communicators),
            use_local_synchronization=True,
            group_desc=name,
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return group


def start_session(given: GivenPlan, device: torch.device, options: GroupOptions) -> Session:
    """Make this rank's groups and split tables; Megatron's own groups exist already.

    Args:
        given: the plan.
        device: of this rank's tensors.
        options: of the groups.

    Raises:
        PlanError: Megatron's groups are not those that the plan was checked for.
    """
    from megatron.core import parallel_state

    all_replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rank, job_ranks = dist.get_rank(all_replicas), dist.get_process_group_ranks(all_replicas)
    if len(job_ranks) != given.plan.units:
        raise PlanError(
            f"{given.path}: the plan has {given.plan.units} members, Megatron's data-and-context-parallel "
            f"group {len(job_ranks)}; make the two equal"
        )
    domains = [replica.domain for replica in given.plan.replicas]
    ranks = [[member.number for member in domain.members] for domain in domains]
    replica = next(number for number, own in enumerate(ranks) if rank in own)
    index = ranks[replica].index(rank)
    schedules = Schedules(given.plan.workload, domains[replica], index, given.plan.exchange.parts)
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
    shard = local_shard(schedule, given.row_multiple, device)
    return Session(given, attention, shard, given.shares[replica] if given.shares else None)


def _with_plan_groups(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        given = given_plan()
        with user_errors():
            # First of all: ranks with different plans would already make different groups of Megatron's.
            _agree(given)
            if given is not None:
                _refuse_bound_device()
                if dist.get_world_size() > 1:
                    start_watch(_store("watch"), dist.get_rank(), dist.get_world_size())
        original(*args, **kwargs)
        with user_errors():
            if given is not None:
                call = signature.bind(*args, **kwargs)
                call.apply_defaults()
                set_active_session(start_session(given, device, GroupOptions.of_call(call.arguments)))
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


def _store(purpose: str) -> dist.Store:
    """The job's store, under a name of its own each time."""
    return dist.PrefixStore(f"hexi-{purpose}-{next(_names)}", dist.distributed_c10d._get_default_store())


def _refuse_bound_device() -> None:
    """Refuse a default group for which NCCL would split the plan's groups off; that takes all ranks."""
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    if bound is not None:
        raise PlanError(
            f"torch.distributed is bound to the device {bound}, from which groups of some ranks cannot be "
            "made; call init_process_group without device_id"
        )


def _agree(given: GivenPlan | None) -> None:
    agree_on_plan(
        _store("agreement"),
        dist.get_rank(),
        dist.get_world_size(),
        given.digest if given else NO_PLAN,
        given.path if given else "",
        _AGREEMENT_TIMEOUT,
    )


def _announce(given: GivenPlan) -> None:
    if dist.get_rank() != 0:
        return
    replicas = given.plan.replicas
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
