"""Pipeline shapes: what a stage sends is as long as this rank's rows.

Megatron computes the length as ``seq_length // context_parallel_size`` in several places. All of them
come out right when the schedule is told this rank's rows times that size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch


def _with_local_length(original: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule = original(*args, **kwargs)
        session = active_session()
        return schedule if session is None else _told(schedule, session)

    return get_forward_backward_func


def _told(schedule: Callable[..., Any], session: Session) -> Callable[..., Any]:
    length = session.shard.rows * dist.get_world_size(session.attention.domain_group)

    @functools.wraps(schedule)
    def forward_backward(*, seq_length: int, decoder_seq_length: int | None = None, **kwargs: Any) -> Any:
        return schedule(
            seq_length=length, decoder_seq_length=None if decoder_seq_length is None else length, **kwargs
        )

    return forward_backward


PIPELINE_PATCHES = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        why="stages send as many rows as this rank holds, not an equal share",
        build=_with_local_length,
        parameters=("pp_size", "vp_size", "schedule_pg_collection"),
    ),
)
