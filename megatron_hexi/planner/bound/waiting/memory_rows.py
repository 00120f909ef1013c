"""What memory of groups has room for, as rows of a linear program (together.py).

Tokens, heads and keys share it: of any one of the other groups keys are there at once, and the own ones are
on their way to one of them. A member with a part p of the heads needs p x what attention to all of its
group's tokens takes: of such a product, planes are below it (McCormick 1976).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.planner.bound.groups.group_memory import Taken
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.rows import RoomRows, Term
from megatron_hexi.planner.bound.waiting.setting import Setting


class MemoryRows:
    """The rows.

    Args:
        program: where they go.
        setting: what groups have in common.
        groups: the groups.
        keys: who sees whose.
    """

    def __init__(
        self, program: RoomRows, setting: Setting, groups: Sequence[GroupLines], keys: KeyTimes
    ) -> None:
        self._program, self._all, self._groups, self._keys = program, setting, groups, keys
        for number, group in enumerate(groups):
            rooms = [group.rooms(site) for site in range(len(group.shape))]
            for stage, taken in enumerate(setting.taken):
                room = sum(of_site[stage] for of_site in rooms)
                for needed in self._needed(number, taken, self._sent(number)):
                    program.fits(room, [(program.tokens[number], 1.0), *needed])
                for site in range(len(program.held[number])):
                    self._on_site(number, site, rooms[site][stage], taken)

    def _on_site(self, number: int, site: int, room: float, taken: Taken) -> None:
        """One of several sites, with its part of the heads."""
        program = self._program
        held, part = program.held[number][site], program.parts[number][site]
        # A KV head that two members have is sent by one of them.
        sent = self._sent(number) if self._all.ratio == 1 else 0.0
        ends = program.bounds(part)
        for needed in self._needed(number, taken, sent):
            for end, of_part in enumerate(ends):
                corner = sum(each * program.bounds(tokens)[end] for tokens, each in needed)
                terms = [(tokens, of_part * each) for tokens, each in needed]
                program.fits(room + of_part * corner, [(held, 1.0), (part, corner), *terms])

    def _needed(self, number: int, taken: Taken, sent: float) -> list[list[Term]]:
        """What all heads of a group need inside attention: with the keys of each of the others.

        Args:
            number: the group.
            taken: memory of a token.
            sent: the part of the group's keys that are on their way.
        """
        own = self._program.tokens[number], taken.attended + sent * taken.sent
        others = [
            (self._program.tokens[of], self._keys.seen(number, of) * taken.received)
            for of in self._others(number)
        ]
        return [[own, other] for other in others] or [[own]]

    def _sent(self, number: int) -> float:
        """The part of a group's keys that goes to the group that needs most of them."""
        return max((self._keys.seen(user, number) for user in self._others(number)), default=0.0)

    def _others(self, number: int) -> list[int]:
        return [other for other in range(len(self._groups)) if other != number]


def is_short(setting: Setting, groups: Sequence[GroupLines]) -> bool:
    """Whether memory may be short: in some order of the groups, with all tokens that they hold at most."""
    for number, group in enumerate(groups):
        keys = max((one.most for other, one in enumerate(groups) if other != number), default=0.0)
        for site in range(len(group.shape)):
            held, part = group.most, 1.0
            if not group.on_one_site:
                held, part = group.holds(site)[1], group.heads[site].max(initial=0.0) / setting.heads
            for room, taken in zip(group.rooms(site), setting.taken, strict=True):
                inside = group.most * (taken.attended + taken.sent) + keys * taken.received
                if held + part * inside > room:
                    return True
    return False
