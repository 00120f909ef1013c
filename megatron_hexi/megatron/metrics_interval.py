"""``--hexi-metrics-interval``: the iterations in which waits are measured.

Each wait needs two CUDA events, a few microseconds of the host each. An iteration of many layers and
micro-batches has thousands of waits, so by default only as many iterations are measured as keep the events
below a thousandth of the time.
"""

from __future__ import annotations

import math
from argparse import Namespace

from megatron_hexi.errors import HexiError
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.plan import Exchange, Plan
from megatron_hexi.plan.program import Wait, attention_program
from megatron_hexi.plan.recompute import Again, stated_recompute

_FLAG = "--hexi-metrics-interval"
#: Host seconds to create and record an event. An estimate; not measured on a GPU.
_EVENT_S = 3e-6
#: The part of the time that events may take.
_MOST_COST = 1e-3
#: FLOP/s above those of any GPU: a B200 has 2.25e15 in dense bf16, by its datasheet.
_FASTEST = 2.5e15
#: Largest default interval: only tiny jobs would have a larger one.
_LEAST_OFTEN = 100
#: Measured iterations that re-planning needs between two looks: a changed speed shows in that many
#: (`replan.planning.advisor.WINDOW`).
LOOKED_AT = 5


def set_metrics_interval(args: Namespace, plan: Plan, on_gpu: bool) -> None:
    """Choose the interval where it is not given, and check it against re-planning.

    Args:
        args: Megatron's arguments; `hexi_metrics_interval` is a number afterwards.
        on_gpu: whether events are CUDA's; on the CPU an event reads the clock.

    Raises:
        HexiError: the message has the flag, its value and the remedy.
    """
    stated, looks = args.hexi_metrics_interval, args.hexi_replan_interval
    if stated is not None and stated < 1:
        raise HexiError(f"{_FLAG} {stated}: a number of iterations; give 1 or more")
    most = None if looks is None else max(1, looks // LOOKED_AT)
    if stated is None:
        chosen = default_interval(args, plan) if on_gpu else 1
        args.hexi_metrics_interval = chosen if most is None else min(most, chosen)
    elif most is not None and stated > most:
        raise HexiError(
            f"{_FLAG} {stated}: measures {looks // stated} iterations of --hexi-replan-interval {looks}, "
            f"which needs {min(looks, LOOKED_AT)}; give {_FLAG} {most}, or --hexi-replan-interval "
            f"{LOOKED_AT * stated}"
        )


def default_interval(args: Namespace, plan: Plan) -> int:
    """Return the least interval for which recording waits takes up to 0.1 % of the time; at most 100."""
    cost = attention_events(args, plan) * _EVENT_S
    return min(_LEAST_OFTEN, math.ceil(cost / (_MOST_COST * least_step_seconds(args, plan))))


def attention_events(args: Namespace, plan: Plan) -> int:
    """Return the most events that a rank records for waits of attention in a measured iteration.

    There are two for each wait of its program, in each layer, pass and micro-batch. Events of gradients and
    stages are few.
    """
    layers = args.num_layers // args.pipeline_model_parallel_size
    most = 0
    for replica in plan.replicas:
        micro_batches = replica.micro_batches or -(
            -_global_batch(args, plan) // (args.micro_batch_size or 1) // len(plan.replicas)
        )
        for stage in replica.stages:
            stage_layers = layers if stage.layers is None else stage.layers[1] - stage.layers[0]
            exchange = stage.exchange or plan.exchange
            groups = max(len(domain.groups) for domain in stage.domains)
            forward, backward = (_waits(groups, exchange, way) for way in (False, True))
            again = "core_attn" in Again.of(stage.recompute or stated_recompute(args))
            most = max(most, 2 * stage_layers * micro_batches * (forward * (1 + again) + backward))
    return most


def least_step_seconds(args: Namespace, plan: Plan) -> float:
    """Return a lower bound of an iteration's seconds: FLOPs of query, output and attention at peak rates.

    Attention under a window or with documents has fewer FLOPs, and is left out.
    """
    workload = plan.workload
    size = workload.head_dim + workload.value_size
    tokens = _global_batch(args, plan) * workload.seq_length
    flops = 6.0 * tokens * args.hidden_size * workload.heads * size
    if not is_packed(args) and not getattr(args, "window_size", None):
        pairs = workload.seq_length / (2 if workload.causal else 1)
        flops += 3.5 * 2 * tokens * pairs * workload.heads * size
    return float(args.num_layers * flops / args.world_size / _FASTEST)


def is_measured(number: int, interval: int) -> bool:
    """Return whether the waits of an iteration are measured; iterations are counted from 1."""
    return number % interval == 0


def _global_batch(args: Namespace, plan: Plan) -> int:
    """Return the sequences of an iteration; by default Megatron takes one micro-batch a replica."""
    return args.global_batch_size or (args.micro_batch_size or 1) * len(plan.replicas)


def _waits(groups: int, exchange: Exchange, backward: bool) -> int:
    """Return the most waits of a pass in a domain of `groups` groups: the first step may travel in parts."""
    steps = (exchange.parts, *([1] * (groups - 2))) if groups > 1 else ()
    program = attention_program(backward, steps, exchange.window, 2 if exchange.parts > 1 else 1, 0)
    return sum(isinstance(operation, Wait) for operation in program)
