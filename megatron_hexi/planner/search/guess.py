"""The first guess of a layout: every group and member by its best rates and memory, whatever links say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.deal import deal_heads, deal_tokens
from megatron_hexi.planner.layouts.layout import Grouping, Layout, Part


@dataclass(frozen=True, eq=False)
class _Alone:
    """A group of units of some kinds, by itself.

    Args:
        heads: of each member.
        speed: its tokens a second.
        cap: the most tokens that its memory bears.
        weights: of members' tokens, by which these are dealt.
        free: bytes of each member's memory.
        inside: of these, what a token of the group takes.
    """

    heads: tuple[int, ...]
    speed: float
    cap: float
    weights: Floats
    free: Floats
    inside: Floats


class FirstGuess:
    """First layouts for any grouping of a fleet's units; groups of the same kinds are worked out once.

    Args:
        fleet: the units.
        rates: their best.
    """

    def __init__(self, fleet: Fleet, rates: Rates) -> None:
        self._fleet, self._rates = fleet, rates
        self._alone: dict[tuple[int, ...], _Alone] = {}

    def layout(self, grouping: Grouping, micro_batches: int) -> Layout:
        """Tokens by groups' speeds, then by members'; heads so that the slowest member is fastest."""
        units, seq_length = self._fleet.units, self._fleet.job.seq_length
        groups = [self._group(tuple(units[unit].kind for unit in part), part) for part in grouping]
        speeds, caps = np.array([one.speed for one in groups]), np.array([one.cap for one in groups])
        splits: dict[tuple[_Alone, int], tuple[int, ...]] = {}
        parts = []
        for part, one, tokens in zip(grouping, groups, deal_tokens(seq_length, speeds, caps), strict=True):
            if (one, tokens) not in splits:
                room = np.maximum(0.0, one.free - one.inside * tokens) / self._rates.token_bytes
                splits[one, tokens] = deal_tokens(tokens, one.weights, room)
            parts.append(Part(part, splits[one, tokens], one.heads))
        return Layout(tuple(parts), micro_batches)

    def _group(self, kinds: tuple[int, ...], units: tuple[int, ...]) -> _Alone:
        if kinds not in self._alone:
            rates, members = self._rates, list(units)
            seconds = 1 / rates.attention[members]
            heads = deal_heads(rates.local_heads, seconds.tolist())
            present = np.array(heads, dtype=float)
            weights, free, inside = rates.token[members], rates.free[members], rates.head_bytes * present
            self._alone[kinds] = _Alone(
                heads=heads,
                speed=float(1 / (1 / weights.sum() + (present * seconds).max())),
                cap=group_cap(1, inside, free, rates.token_bytes),
                weights=weights,
                free=free,
                inside=inside,
            )
        return self._alone[kinds]


def group_cap(total: int, inside: Floats, free: Floats, token_bytes: float) -> float:
    """The most tokens of a group: what is inside attention grows with them, the rest is for tokens.

    x times as many tokens leave a member room for (free - x inside) / bytes a token, and all x total.

    Args:
        total: its tokens.
        inside: bytes inside attention of each member at so many.
        free: bytes for these and for tokens.
        token_bytes: of one token held.
    """
    room, taken = np.maximum(free, 0.0).sum() / token_bytes, inside.sum() / token_bytes
    most = total * room / (total + taken) if total else float("inf")
    # No member's attention alone may pass its memory.
    tight = inside > 0
    return float(min(most, (total * np.maximum(free, 0.0)[tight] / inside[tight]).min(initial=np.inf)))
