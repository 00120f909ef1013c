"""Measurement of training steps, and of Megatron's waits for other ranks in them.

Transfers of `runtime` are measured there (`runtime.waiting`). Here are the step, the synchronisation of
gradients and weights, messages of pipeline stages, and tokens that experts exchange. All else counts as
work: also all-reduces of tensor parallelism, and norms and losses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.metrics_interval import is_measured
from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import STEP_PARAMETERS, Patch, patched
from megatron_hexi.runtime.waiting import StepMeter, Wait, waiting

#: The meter of this process.
METER = StepMeter()


class _TimedRequest:
    """A message in flight between stages, whose wait is measured."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> Any:
        with waiting("pipeline"):
            return self._request.wait()


@patched(
    "megatron.training.training:train_step",
    why="measures a step and the waiting in it",
    parameters=STEP_PARAMETERS,
)
def _measured(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    if active_session() is None:
        return original(*args, **kwargs)
    number = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"] + 1
    # The first step of a job is logged separately.
    waits = METER.is_new or is_measured(number, get_args().hexi_metrics_interval)
    with METER.step(waits):
        return original(*args, **kwargs)


def _waits(kind: Wait) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that wraps a function so that its time counts as waiting."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def waited(*args: Any, **kwargs: Any) -> Any:
            with waiting(kind):
                return original(*args, **kwargs)

        return waited

    return build


@patched(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    why="counts waiting for other pipeline stages",
    parameters=(
        *("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape"),
        "wait_on_reqs",
    ),
)
def _with_timed_requests(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with waiting("pipeline"):
        from_previous, from_next, requests = original(*args, **kwargs)
    if isinstance(requests, dict):  # still in flight: the schedule waits for each when it must
        requests = {name: _TimedRequest(request) for name, request in requests.items()}
    return from_previous, from_next, requests


def _waits_statically(kind: Wait) -> Callable[[Any], Any]:
    """Return a function that wraps a static method so that its time counts as waiting."""
    build = _waits(kind)
    return lambda original: staticmethod(build(original.__func__))


_ALL_TO_ALL = ("ctx", "group", "input", "output_split_sizes", "input_split_sizes")
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

STEP_TIME_PATCHES = (
    _measured,
    Patch(
        target=f"{_BUCKETS}.finish_grad_sync",
        why="counts waiting for gradients",
        build=_waits("gradients"),
        parameters=("self", "force_all_reduce"),
    ),
    Patch(
        target=f"{_BUCKETS}.start_param_sync",
        why="counts waiting for weights, where nothing hides them",
        build=_waits("gradients"),
        parameters=("self", "force_sync"),
    ),
    Patch(
        target=f"{_BUCKETS}.finish_param_sync",
        why="counts waiting for weights",
        build=_waits("gradients"),
        parameters=("self", "skip_next_bucket_dispatch"),
    ),
    _with_timed_requests,
    Patch(
        target="megatron.core.tensor_parallel.mappings:_AllToAll.forward",  # backward passes call it, too
        why="counts waiting for tokens on their way to experts and back",
        build=_waits_statically("experts"),
        parameters={"<0.18": _ALL_TO_ALL, ">=0.18": (*_ALL_TO_ALL, "use_nccl_stream")},
    ),
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
        why="counts waiting for the other ranks' numbers of tokens for each expert",
        build=_waits("experts"),
        parameters=("self", "routing_map"),
    ),
)
