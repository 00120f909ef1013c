"""What groups compute in the steps of the exchange: part of the lower bound (together.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.rows import Start


class Blocks:
    """The blocks of a pass.

    Args:
        tokens: of each group, variables.
        groups: the groups.
        keys: who sees whose.
        order: numbers of the groups, the outermost first, as far as they are known.
        causal: whether half of the keys are seen at least.
        way: 0 forward, 1 backward.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        groups: Sequence[GroupLines],
        keys: KeyTimes,
        order: Sequence[int],
        causal: bool,
        way: int,
    ) -> None:
        self._tokens = tokens
        self._groups, self._keys, self._order, self._way = groups, keys, order, way
        self._half = 0.5 if causal else 1.0

    def at(self, turn: int) -> int | None:
        """The group at a place in the order, if it is known; the innermost one comes before the outermost."""
        place = turn % len(self._groups)
        return self._order[place] if place < len(self._order) else None

    def sources(self, turn: int) -> list[int]:
        """The groups whose keys the one at a place uses step by step, as far as they are known."""
        found = list[int]()
        for step in range(1, len(self._groups)):
            source = self.at(turn - step)
            if source is None:
                break
            found.append(source)
        return found

    def work(self, number: int, place: int, left: Mapping[int, float]) -> Floats:
        """Attention to other groups' keys and merging, of a site with all heads, [pieces].

        Args:
            number: the group.
            place: of the site.
            left: of some groups, the part of their keys that counts; of all others, all.
        """
        group = self._groups[number]
        parts = {of: left.get(of, 1.0) for of in range(len(self._groups)) if of != number}
        work = group.work(place, self._way, sum(part * self._groups[of].least for of, part in parts.items()))
        queries, keys = group.merging_of_all(place, self._way)
        # Half of the keys' gradients is counted with attention.
        seen = sum(part * self._keys.seen(of, number) for of, part in parts.items())
        more = sum(
            part * (self._keys.seen(number, of) - self._half) * self._groups[of].least
            for of, part in parts.items()
        )
        merging: Floats = work + queries * seen * group.grid[:-1] + keys * more
        return merging

    def beyond(self, number: int, place: int, left: Mapping[int, float]) -> Start:
        """What `work` grows by with the others' tokens, of a site with its fewest heads; arguments as there.

        Of a product x y, x y' + x' (y - y') is below it, where x' and y' are the least (McCormick 1976).
        """
        each = self._groups[number].least_work(place, self._way)
        parts = {of: each * left.get(of, 1.0) for of in range(len(self._groups)) if of != number}
        terms = [(self._tokens[of], part) for of, part in parts.items() if part]
        return terms, -sum(part * self._groups[of].least for of, part in parts.items())

    def of_step(self, turn: int, place: int, step: int) -> Floats | float:
        """The block of a step, of a site with all heads, [pieces]; step 0: the own one.

        In the backward pass, that one is computed before and after the others: nothing is known of it.
        """
        number, source = self._order[turn], self.at(turn - step)
        if step == 0:
            return self._groups[number].own_block(place) if self._way == 0 else 0.0
        if source is None:
            return 0.0
        return self.work(number, place, dict.fromkeys(set(range(len(self._groups))) - {source}, 0.0))

    def of_any(self, turn: int, step: int) -> float:
        """The same of any member that has heads, at least."""
        group = self._groups[self._order[turn]]
        return min(
            group.part_of_any(place) * float(np.min(self.of_step(turn, place, step)))
            for place in range(len(group.shape))
        )
