"""Count the messages and bytes that a rank sends in one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule, Transfer


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that a rank sends in the forward or backward pass of one attention layer.

    Args:
        all_to_all_bytes: bytes that the rank sends to other members of its group in these all-to-alls.
        messages: number of point-to-point messages that the rank sends to other groups.
        message_bytes: bytes of these point-to-point messages.
    """

    all_to_alls: int
    all_to_all_bytes: int
    messages: int
    message_bytes: int


class LayerTraffic(NamedTuple):
    """A rank's traffic in the forward and in the backward pass of one attention layer.

    Args:
        forward: all-to-alls of query, key, value and output; exchange of keys and values.
        backward: all-to-alls of the gradients of output, query, key and value; exchange of keys, values and
            the gradients of both.
    """

    forward: Traffic
    backward: Traffic


def attention_traffic(
    schedule: Schedule,
    head_dim: int,
    batch: int,
    element_bytes: int,
    value_dim: int | None = None,
    exchanged: int | None = None,
) -> LayerTraffic:
    """Return the messages and bytes that a rank sends in one attention layer.

    If the all-to-alls are split in two halves of the heads, each half counts as an all-to-all.

    Args:
        value_dim: size of one head's value; ``None``: `head_dim`.
        exchanged: columns of a KV head that are exchanged; ``None``: the columns of key and value.
    """
    values = head_dim if value_dim is None else value_dim
    columns = head_dim + values if exchanged is None else exchanged
    others = [i for i in range(len(schedule.heads)) if i != schedule.position]
    elsewhere = schedule.group_tokens - schedule.tokens
    sends = [send for step in schedule.steps for send in step.sends]
    returns = [receive for step in schedule.steps for receive in step.receives]

    def traffic(inward: int, outward: int, messages: Sequence[Transfer]) -> Traffic:
        return Traffic(
            all_to_alls=2 * len(schedule.halves) if exchanges_heads(schedule) else 0,
            all_to_all_bytes=(inward + outward) * batch * element_bytes,
            messages=len(messages),
            message_bytes=sum(_size(one.kv) * one.keys for one in messages) * columns * batch * element_bytes,
        )

    heads, kv = (schedule.tokens * sum(_size(of[i]) for i in others) for of in (schedule.heads, schedule.kv))
    own_columns = schedule.own_heads * head_dim + _size(schedule.own_kv) * columns
    return LayerTraffic(
        traffic(heads * head_dim + kv * columns, elsewhere * schedule.own_heads * values, sends),
        traffic(heads * values, elsewhere * own_columns, [*sends, *returns]),
    )


def exchanges_heads(schedule: Schedule) -> bool:
    """Return whether the rank's group has all-to-alls, which needs several members and at least one token."""
    return len(schedule.members) > 1 and schedule.group_tokens > 0


def _size(span: Range) -> int:
    return span[1] - span[0]
