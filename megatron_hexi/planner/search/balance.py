"""Balances a grouping: tokens and heads of each unit, such that none waits.

For a fixed grouping, token work is nearly proportional to a shard's tokens, and a group's attention to its
tokens (the nested zigzag gives it the area tokens x S / 2) times a member's heads. So the balance is found by
scaling: time the layout, then
- give members tokens in proportion to their timed tokens/s: all of a group end token work at the same time;
- assign heads so that the largest heads x seconds a head is least;
- give groups tokens in proportion to their timed tokens/s: all groups end a layer at the same time;
each under the caps that memory sets. The cost model times the layout again after each round, so curves,
latencies and shared links count as they do in the end. All of it is nearly linear: a few rounds suffice.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.layouts.deal import assign_heads, assign_tokens
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.measured import UnitTimes
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.guess import group_cap


def balance(judge: Judge, rates: Rates, trial: Trial, rounds: int) -> Trial:
    """Return the best of a trial and its rebalanced layouts."""
    best = trial
    for _ in range(rounds):
        following = rebalanced(rates, trial)
        if following == trial.layouts[0]:
            break
        trial = judge.try_out(trial.fleet, [following], trial.window)
        if trial.order < best.order:
            best = trial
        elif trial.fits:
            break
    return best


def rebalanced(rates: Rates, trial: Trial) -> Layout:
    """Return the layout that would be balanced if times were proportional to work."""
    layout = trial.layouts[0]
    measured = UnitTimes.of(trial)
    scale = _token_scale(rates, trial, measured)
    weights, caps, members = [], [], []
    for part in layout.parts:
        units = list(part.units)
        tokens, present = np.array(part.tokens, dtype=float), np.array(part.heads, dtype=float)
        inside, free = measured.inside[units], measured.free[units]
        speeds = np.where(
            tokens > 0, tokens / np.maximum(measured.token[units], 1e-300), rates.token[units] * scale
        )
        room = np.maximum(0.0, free - inside) / measured.token_bytes
        seconds = _head_seconds(rates, units, present, measured.attention[units])
        heads = assign_heads(rates.local_heads, list(seconds), _head_caps(present, inside, free))
        members.append((speeds, room, heads))
        caps.append(group_cap(part.total, inside, free, measured.token_bytes))
        busy = float(measured.group[units[0]])
        weights.append((part.total or 1) / busy if busy > 0 else 1.0)
    totals = assign_tokens(trial.fleet.job.seq_length, np.array(weights), np.array(caps))
    parts = [
        A2AGroup(part.units, assign_tokens(total, speeds, room), heads)
        for part, total, (speeds, room, heads) in zip(layout.parts, totals, members, strict=True)
    ]
    return Layout(tuple(parts), layout.micro_batches)


def _token_scale(rates: Rates, trial: Trial, measured: UnitTimes) -> float:
    """Return timed over best tokens/s of a unit with tokens, a factor for rates of units without any."""
    for part in trial.layouts[0].parts:
        for unit, tokens in zip(part.units, part.tokens, strict=True):
            if tokens:
                return float(tokens / measured.token[unit] / rates.token[unit])
    return 1.0


def _head_seconds(rates: Rates, units: list[int], dealt: Floats, attention: Floats) -> Floats:
    """Return the seconds per head on each member; estimated for members without heads."""
    best = 1 / rates.attention[units]
    has = (dealt > 0) & (attention > 0)
    if not has.any():
        return best
    seconds = np.where(has, attention / np.maximum(dealt, 1), 0.0)
    scale = float((seconds[has] / best[has]).mean())
    return np.where(has, seconds, best * scale)


def _head_caps(dealt: Floats, inside: Floats, free: Floats) -> list[int]:
    """Return the most heads that each member's memory holds at the group's present tokens."""
    per_head = np.where(dealt > 0, inside / np.maximum(dealt, 1), 0.0)
    per_head = np.where(per_head > 0, per_head, max(1.0, float(per_head.max())))
    return [int(count) for count in np.maximum(free, 0.0) // per_head]
