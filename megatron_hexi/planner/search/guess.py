"""First layouts, from the units' best rates and memory, without regard to links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.deal import assign_heads, assign_tokens
from megatron_hexi.planner.layouts.layout import A2AGroup, Grouping, Layout


@dataclass(frozen=True, eq=False)
class _GroupRates:
    """Speed and memory of a group taken alone, ignoring the exchange with other groups.

    Args:
        free: bytes of each member's memory for tokens.
        inside: bytes of each member's memory that a token of the group takes inside attention.
    """

    heads: tuple[int, ...]
    speed: float
    cap: float
    weights: Floats
    free: Floats
    inside: Floats


class FirstGuess:
    """First layouts for any grouping of a fleet's units; groups of the same kinds are worked out once."""

    def __init__(self, fleet: Fleet, rates: Rates) -> None:
        self._fleet, self._rates = fleet, rates
        self._alone: dict[tuple[int, ...], _GroupRates] = {}

    def layout(self, grouping: Grouping, micro_batches: int) -> Layout:
        """Return the layout with tokens by speed, and with heads such that the slowest member is fastest."""
        units, seq_length = self._fleet.units, self._fleet.job.seq_length
        groups = [self._group(tuple(units[unit].kind for unit in part), part) for part in grouping]
        speeds, caps = np.array([group.speed for group in groups]), np.array([group.cap for group in groups])
        splits: dict[tuple[_GroupRates, int], tuple[int, ...]] = {}
        parts = []
        for part, group, tokens in zip(
            grouping, groups, assign_tokens(seq_length, speeds, caps), strict=True
        ):
            if (group, tokens) not in splits:
                room = np.maximum(0.0, group.free - group.inside * tokens) / self._rates.token_bytes
                splits[group, tokens] = assign_tokens(tokens, group.weights, room)
            parts.append(A2AGroup(part, splits[group, tokens], group.heads))
        return Layout(tuple(parts), micro_batches)

    def _group(self, kinds: tuple[int, ...], units: tuple[int, ...]) -> _GroupRates:
        if kinds not in self._alone:
            rates, members = self._rates, list(units)
            seconds = 1 / rates.attention[members]
            heads = assign_heads(rates.local_heads, seconds.tolist())
            present = np.array(heads, dtype=float)
            weights, free, inside = rates.token[members], rates.free[members], rates.head_bytes * present
            self._alone[kinds] = _GroupRates(
                heads=heads,
                speed=float(1 / (1 / weights.sum() + (present * seconds).max())),
                cap=group_cap(1, inside, free, rates.token_bytes),
                weights=weights,
                free=free,
                inside=inside,
            )
        return self._alone[kinds]


def group_cap(total: int, inside: Floats, free: Floats, token_bytes: float) -> float:
    """Return the most tokens that fit in a group's memory.

    With x times as many tokens a member has room for (free - x inside) / token_bytes tokens, and all members
    together need x total.

    Args:
        inside: bytes of each member inside attention, at the present tokens.
        free: bytes of each member for `inside` and for tokens.
        token_bytes: bytes of one token held.
    """
    room, taken = np.maximum(free, 0.0).sum() / token_bytes, inside.sum() / token_bytes
    most = total * room / (total + taken) if total else float("inf")
    # No member's attention alone may pass its memory.
    tight = inside > 0
    return float(min(most, (total * np.maximum(free, 0.0)[tight] / inside[tight]).min(initial=np.inf)))
