"""Rows and micro-batches of Megatron's pipeline schedules: this rank's, in place of equal ones.

Megatron computes the rows as ``seq_length // context_parallel_size`` in several places. All are right when
the schedule is given this rank's rows times that size. Where replicas differ, each runs its own number of
micro-batches; collectives over replicas (gradients, the count of tokens, losses) come once, after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.ministages import forward_backward_by_ministages
from megatron_hexi.patching import patched


@patched(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="stages send as many rows as this rank holds, and run as many micro-batches as its replica takes",
    parameters={
        "<0.19": ("pp_size", "vp_size"),
        ">=0.19": ("pp_size", "vp_size", "schedule_pg_collection"),
    },
)
def _with_own_sizes(
    original: Callable[..., Callable[..., Any]], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    schedule = original(*args, **kwargs)
    return schedule if active_session() is None else _with_plan_sizes(schedule)


def _with_plan_sizes(schedule: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    @functools.wraps(schedule)
    def forward_backward(
        *,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        session = active_session()  # Megatron gets a schedule once; the plan may have been swapped since
        assert session is not None, "no plan is dropped before the training ends"
        length = session.shard.rows * parallel_state.get_context_parallel_world_size()
        share, stages = session.share, session.stages
        if share is not None:
            assert num_microbatches == share.total, "no job with other batches passes the checks"
            num_microbatches = share.count
        if stages is not None or session.given.plan.rates is not None:
            # Where rows differ from batch to batch, Megatron's communicator sends their number ahead of them;
            # where stages differ, a table has it, whatever Megatron Bridge sets for packed texts.
            for chunk in model if isinstance(model, list) else [model]:
                get_model_config(chunk).variable_seq_lengths = stages is None
        if stages is not None:
            first, last = stages.view.place.samples
            micro_batch_size = last - first
            stages.channels.begin(num_microbatches, num_microbatches)
        by_ministages = stages is not None and stages.view.place.ministages is not None
        result = (forward_backward_by_ministages if by_ministages else schedule)(
            model=model,
            num_microbatches=num_microbatches,
            seq_length=length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None if decoder_seq_length is None else length,
            forward_only=forward_only,
            **kwargs,
        )
        if stages is not None:
            stages.channels.finish()
        return result

    return forward_backward


PIPELINE_PATCHES = (_with_own_sizes,)
