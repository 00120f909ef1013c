"""Messages and bytes that a rank sends in one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule, Transfer


@dataclass(frozen=True)
class Traffic:
    """A rank's messages and bytes in the forward or backward pass of one attention layer.

    Args:
        all_to_alls: collectives inside its group.
        all_to_all_bytes: bytes that it sends to other members.
        messages: point-to-point messages that it sends to other groups.
        message_bytes: bytes of these messages.
    """

    all_to_alls: int
    all_to_all_bytes: int
    messages: int
    message_bytes: int


class LayerTraffic(NamedTuple):
    """The traffic of both passes.

    Args:
        forward: query, key and value in, keys and values exchanged, output back.
        backward: the output's gradient in, keys, values and their gradients exchanged, all gradients back.
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
    """Return what a rank sends in an attention layer.

    Halves of queries and of outputs are all-to-alls of their own.

    Args:
        schedule: the rank's split tables.
        head_dim: size of one head.
        batch: sequences of a micro-batch.
        element_bytes: bytes of an element.
        value_dim: size of one head's values; ``None``: the same.
        exchanged: columns of a KV head that travel; ``None``: those of its key and value.
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
            message_bytes=_keys_and_values(messages, columns) * batch * element_bytes,
        )

    heads, kv = (schedule.tokens * sum(_size(of[i]) for i in others) for of in (schedule.heads, schedule.kv))
    own_columns = schedule.own_heads * head_dim + _size(schedule.own_kv) * columns
    return LayerTraffic(
        traffic(heads * head_dim + kv * columns, elsewhere * schedule.own_heads * values, sends),
        traffic(heads * values, elsewhere * own_columns, [*sends, *returns]),
    )


def exchanges_heads(schedule: Schedule) -> bool:
    """Whether the rank's group has all-to-alls: several members, and tokens."""
    return len(schedule.members) > 1 and schedule.group_tokens > 0


def _size(span: Range) -> int:
    return span[1] - span[0]


def _keys_and_values(transfers: Sequence[Transfer], width: int) -> int:
    return sum(_size(transfer.kv) * transfer.keys for transfer in transfers) * width
