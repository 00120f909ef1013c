"""Times and memory of a trial by unit, from which balancing starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.memory import allocated_bytes
from megatron_hexi.cost.memory_terms import sum_terms
from megatron_hexi.planner.layouts.layout import units_by_rank
from megatron_hexi.planner.layouts.trial import Trial

#: Memory is planned this full at most: whole tokens and heads do not fill it to the byte.
_FULL = 0.995


@dataclass(frozen=True, eq=False)
class UnitTimes:
    """Times and memory of each unit of a fleet, the largest of its pipeline stages, [units].

    Times are seconds of all passes of a mean layer.

    Args:
        token: seconds of token work, with the layer's share of the vocabulary's.
        attention: seconds of attention.
        group: seconds of the unit's group by itself, without waiting for other groups.
        inside: bytes of memory that depend on heads and the group's tokens.
        free: bytes of memory for `inside` and for tokens, the least of the stages.
        token_bytes: bytes of memory of one more token.
    """

    token: Floats
    attention: Floats
    group: Floats
    inside: Floats
    free: Floats
    token_bytes: float

    @classmethod
    def of(cls, trial: Trial) -> UnitTimes:
        """Return the times and memory of a trial's units."""
        timing, used = trial.timing, units_by_rank(trial.fleet, trial.layouts)
        size, group = len(used), timing.arrays.group
        token, attention, busy = (np.zeros(size) for _ in range(3))
        inside, free, per_token = np.zeros(size), np.full(size, np.inf), 1.0
        for number, stage in enumerate(timing.stages):
            logits = np.add(*stage.last.passes) / stage.layers
            shares = [1.0] * len(stage.passes)
            if len(stage.kinds) > 1:  # shares of a mean layer
                shares = [float(np.mean(repeat / stage.layers)) for repeat in stage.repeats]
            passes = list(zip(shares, stage.passes, strict=True))
            token = np.maximum(
                token, sum(n * (times.token + times.tensor_parallel) for n, times in passes) + logits
            )
            attention = np.maximum(attention, sum(n * times.attention for n, times in passes))
            busy = np.maximum(busy, sum(n * times.undisturbed for n, times in passes) + logits)
            terms = timing.memory[number]
            # A layer grows with heads, the loss with tokens; the larger of the two is there.
            loss, layer = sum_terms(terms, "loss"), sum_terms(terms, "layer")
            held, inside_kept = sum_terms(terms, "kept", "tokens"), sum_terms(terms, "kept", "heads")
            by_tokens = allocated_bytes(held + np.where(loss > 0, loss + layer, 0.0))
            by_heads = allocated_bytes(inside_kept + np.where(loss > 0, 0.0, layer))
            left = _FULL * timing.usable[number] - (timing.needed[number] - by_tokens - by_heads)
            inside, free = np.maximum(inside, by_heads), np.minimum(free, left)
            tokens = timing.arrays.tokens
            per_token = max(per_token, float((by_tokens[tokens > 0] / tokens[tokens > 0]).max(initial=0.0)))
        longest = np.zeros(int(group.max()) + 1)
        np.maximum.at(longest, group, busy)
        place = np.zeros(len(trial.fleet.units), dtype=np.int64)
        place[used] = np.arange(size)
        return cls(
            token=token[place],
            attention=attention[place],
            group=longest[group][place],
            inside=inside[place],
            free=free[place],
            token_bytes=per_token,
        )
