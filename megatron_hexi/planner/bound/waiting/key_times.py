"""Seconds that keys of one group take to another: part of the lower bound (together.py).

A step of the exchange is as fast as the units of the one group can send and those of the other receive: on
average of all heads, whose owners and users are no less busy than if all members had equally many. What is
said of that average holds for one of the units.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.rows import Rows, Term
from megatron_hexi.planner.bound.waiting.setting import Setting, Units


class KeyTimes:
    """Keys between any two groups, one way.

    Args:
        program: where rows go.
        setting: what groups have in common.
        groups: the groups.
        order: their numbers, the outermost first, as far as they are known.
    """

    def __init__(
        self,
        program: Rows,
        setting: Setting,
        groups: Sequence[GroupLines],
        order: Sequence[int],
    ) -> None:
        self._program, self._all, self._groups = program, setting, groups
        self._known: dict[tuple[int, ...], list[Term]] = {}
        self._between: dict[tuple[int, ...], float] = {}
        #: Where each group is in the order, as far as it is known.
        self._turn = {number: turn for turn, number in enumerate(order)}

    def between(self, by: int, place: int, of: int) -> float:
        """Seconds a token of a group whose keys another one needs for all heads on a site; 0 if not known.

        It is known where the group has all of its heads on one site, or none on this one.
        """
        name = by, place, of
        if name not in self._between:
            self._between[name] = self._find_between(*name)
        return self._between[name]

    def _find_between(self, by: int, place: int, of: int) -> float:
        group, other = self._groups[by], self._groups[of]
        here, units = group.shape[place]
        users = group.members if group.on_one_site else float(units)
        if other.on_one_site:
            # Of a KV head that several members share, it is not known who sends it.
            [owners] = other.shape
            is_known = group.on_one_site and self._all.ratio == 1
            senders = other.members if is_known else float(owners[1])
            bandwidth = self._all.bandwidth((here, units), owners, (users, senders))
        elif any(other.heads[site][-1] for site in self._beside((here, units), other)):
            return 0.0
        else:
            bandwidth = self._all.lanes(here, users)
        return self.seen(by, of) * self._all.key_bytes / bandwidth

    def needed(self, by: int, place: int, of: int) -> list[Term]:
        """Seconds for the keys of a group that another one's site needs."""
        if not self._groups[of].on_one_site:
            return self.crossed(by, place, of)
        each = self.between(by, place, of)
        if self._groups[by].on_one_site:
            return [(self._program.tokens[of], each)]
        return [(self._program.parts[by][place], each * self._groups[of].least)]

    def crossed(self, by: int, place: int, of: int) -> list[Term]:
        """Seconds for those of them that come from other sites."""
        return self.crossing(by, place, of, of)

    def sends(self, of: int, place: int, users: Sequence[int]) -> list[Term]:
        """Seconds for a group's keys to others, or from one of its sites to other sites.

        It is known only where each KV head is sent by the same unit.
        """
        if not self.knows_owners(of):
            return []
        spread = [user for user in users if not self._groups[user].on_one_site]
        if not self._groups[of].on_one_site:
            return [term for user in users for term in self.crossing(of, place, user, of)]
        each = sum(self.between(user, 0, of) for user in users if user not in spread)
        alone = [(self._program.tokens[of], each)] if each else []
        return [*alone, *(term for user in spread for term in self.crossing(of, 0, user, of))]

    def knows_owners(self, number: int) -> bool:
        """Whether it is known which unit of a group sends a KV head: no two have queries of it."""
        return self._all.ratio == 1 or self._groups[number].shape[0][1] == 1 == len(
            self._groups[number].shape
        )

    def is_between_counterparts(self, one: int, other: int) -> bool:
        """Whether each head's keys travel between the units that have it, of two groups on one site each."""
        return (
            self._groups[one].on_one_site
            and self._groups[other].on_one_site
            and self.knows_owners(one)
            and self.knows_owners(other)
        )

    def crossing(self, number: int, place: int, other: int, of: int) -> list[Term]:
        """Seconds of a site's units for keys that it gets from another group's other sites, or sends there.

        Of the heads that it has, these are what the other group has elsewhere: of a part f, and a part f' on
        the same site, no less than f - f'. Queries that share a KV head may be on several units.

        Args:
            number: the group.
            place: its site.
            other: the other group.
            of: the one of the two whose keys these are.
        """
        name = number, place, other, of
        if name not in self._known:
            self._known[name] = self._find_crossing(*name)
        return self._known[name]

    def _find_crossing(self, number: int, place: int, other: int, of: int) -> list[Term]:
        group, far, keys, heads = self._groups[number], self._groups[other], self._groups[of], self._all.heads
        (here, units), tokens = group.shape[place], self._program.tokens[of]
        seen = self.seen(number, other) if of == other else self.seen(other, number)
        each = seen * self._all.key_bytes / self._all.lanes(here, units)
        beside = self._beside((here, units), far)
        if not beside and group.on_one_site:
            return [(tokens, each)]
        if far.on_one_site and beside:
            return []
        # h neighbouring heads read at most h / ratio + 2 (1 - 1 / ratio) KV heads.
        shared = sum(2 * far.shape[site][1] * (self._all.ratio - 1) for site in beside) / heads
        excess, at_zero = [(self._program.parts[other][site], -1.0) for site in beside], -shared
        most = at_zero - sum(far.heads[site][0] for site in beside) / heads
        if group.on_one_site:
            at_zero, most = at_zero + 1.0, most + 1.0
        else:
            excess.append((self._program.parts[number][place], 1.0))
            most += group.heads[place][-1] / heads
        if most <= 0 or not each:
            return []
        # Two planes below a product (McCormick 1976): both at the least, or both at the most.
        time = self._program.time()
        for held, beyond in ((keys.least, 0.0), (keys.most, most)):
            terms = [(variable, each * held * sign) for variable, sign in excess]
            self._program.above(time, [*terms, (tokens, each * beyond)], each * held * (at_zero - beyond))
        return [(time, 1.0)]

    def _beside(self, units: Units, other: GroupLines) -> list[int]:
        """Sites of a group on which the units of another one may be."""
        return [site for site, others in enumerate(other.shape) if self._all.may_meet(units, others)]

    def seen(self, by: int, of: int) -> float:
        """The part of a group's keys that another one sees: half of those outside it, all inside it."""
        if not self._all.causal:
            return 1.0
        # Who is not known to be outside may be inside.
        unknown = len(self._groups)
        return 1.0 if self._turn.get(by, unknown) < self._turn.get(of, unknown) else 0.5
