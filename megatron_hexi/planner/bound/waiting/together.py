"""Whether given groups, which wait for each other, may hold the sequence: part of the lower bound (whole.py).

What they take at least is a linear program's (group_program.py). It is the closer the more is known of their
tokens, so these are narrowed first. Heads are told apart by branch and bound, and so are orders of groups,
the outermost first. Most groups are ruled out by a few of the rows already: these come first, by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import Shape
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.group_program import GroupProgram, Stage
from megatron_hexi.planner.bound.waiting.group_reach import Limits
from megatron_hexi.planner.bound.waiting.memory_rows import is_short
from megatron_hexi.planner.bound.waiting.setting import Setting

#: Tokens that groups hold at most are found again so often, as long as that narrows them by this part of all.
_ROUNDS, _NARROWER = 4, 0.002
#: So many parts of the heads' possible numbers are looked at.
_BRANCHES = 60
#: Of so few groups, one step of the exchange is all that there is.
_FEW = 2
#: What rounding may take away.
_ROUNDING = 1e-6

#: Numbers of groups, the outermost first, as far as they are known.
_Order = tuple[int, ...]
_Settings = Sequence[Setting]


@dataclass
class Tries:
    """Linear programs that may still be solved.

    Args:
        left: pairs of groups of all of them together, on pipeline stages that differ.
    """

    left: int


def suffices(settings: _Settings, shapes: Sequence[Shape], most: Floats, tries: Tries) -> bool:
    """Whether groups of these shapes may hold the sequence in the settings' longest time.

    Args:
        settings: what groups have in common, on pipeline stages that differ.
        shapes: of the groups.
        most: tokens of each.
        tries: to find out; when there are none left, they may.
    """
    if len(shapes) > _FEW:
        several, one = ([setting.with_window(window) for setting in settings] for window in (2, 1))
        stages = _stages(several, shapes, most, _any_heads(settings, shapes))
        if stages is not None and is_short(*stages[0]):
            # With one step of the exchange under way, keys take less memory; but groups wait for each other.
            return any(_may_at_all(of_window, shapes, most, tries) for of_window in (several, one))
    return _may_at_all(settings, shapes, most, tries)


def _may_at_all(settings: _Settings, shapes: Sequence[Shape], most: Floats, tries: Tries) -> bool:
    """Whether groups may hold the sequence with so many steps under way."""
    rough = _narrowed(settings, shapes, most, (), tries, roughly=True)
    narrowed = None if rough is None else _narrowed(settings, shapes, rough, (), tries)
    if narrowed is None or not _may(settings, shapes, narrowed, (), tries):
        return False
    names = list(zip(shapes, most.tolist(), strict=True))
    return len(shapes) == 1 or _in_some_order(settings, shapes, narrowed, (), names, tries)


def _in_some_order(
    settings: _Settings,
    shapes: Sequence[Shape],
    most: Floats,
    outermost: _Order,
    names: Sequence[tuple[Shape, float]],
    tries: Tries,
) -> bool:
    """The same for groups of which the outermost are known: depth first, those that are alike in one order.

    Args:
        settings: as of `suffices`.
        shapes: likewise.
        most: likewise.
        outermost: numbers of those that are known.
        names: by which groups are alike.
        tries: as of `suffices`.
    """
    left = [number for number in range(len(shapes)) if number not in outermost]
    for number in {names[number]: number for number in reversed(left)}.values():
        # Who is inside all others is known with them.
        order = (*outermost, number, *(set(left) - {number} if len(left) == 2 else ()))
        found = _narrowed(settings, shapes, most, order, tries)
        if found is None:
            continue
        if len(order) < len(shapes):
            if _in_some_order(settings, shapes, found, order, names, tries):
                return True
        elif _may(settings, shapes, found, order, tries):
            return True
    return False


def _narrowed(
    settings: _Settings,
    shapes: Sequence[Shape],
    most: Floats,
    order: _Order,
    tries: Tries,
    roughly: bool = False,
) -> Floats | None:
    """What groups hold at most together, which is less than each by itself; ``None``: not the sequence.

    The closer that is known, the closer are the lines.
    """
    [setting, *_] = settings
    everywhere = _any_heads(settings, shapes)
    for _ in range(_ROUNDS):
        stages = _stages(settings, shapes, most, everywhere)
        if stages is None:
            return None
        if tries.left <= 0:
            break
        each = len(shapes) ** 2 * len(settings)
        tries.left -= each
        program = GroupProgram(stages, order, roughly)
        if not program.suffices():
            return None
        tries.left -= each
        before, most = most, program.most()
        if (before - most).max() < _NARROWER * setting.length:
            break
    return most


def _may(settings: _Settings, shapes: Sequence[Shape], most: Floats, order: _Order, tries: Tries) -> bool:
    """Whether they may hold it with some numbers of heads on each site: branch and bound over these."""
    open_ = [_any_heads(settings, shapes)]
    for _ in range(_BRANCHES):
        if tries.left <= 0:
            return True
        limits = open_.pop()
        tries.left -= len(shapes) ** 2 * len(settings)
        stages = _stages(settings, shapes, most, limits)
        if stages is not None and GroupProgram(stages, order).suffices():
            halves = _halves(stages[0].groups, limits)
            if not halves:
                return True
            open_ += halves
        if not open_:
            return False
    return True


def _stages(
    settings: _Settings, shapes: Sequence[Shape], most: Floats, limits: Sequence[Limits]
) -> list[Stage] | None:
    """All groups with the tokens that the others leave them; ``None`` if that is too many."""
    length = settings[0].length
    least = np.maximum(0.0, length - (most.sum() - most))
    if (least > most + _ROUNDING * length).any():
        return None
    least = np.minimum(least, most)
    return [
        Stage(
            setting,
            [
                GroupLines(setting, shape, float(low), float(high), len(shapes), heads)
                for shape, low, high, heads in zip(shapes, least, most, limits, strict=True)
            ],
        )
        for setting in settings
    ]


def _any_heads(settings: _Settings, shapes: Sequence[Shape]) -> list[Limits]:
    return [((0, settings[0].heads),) * len(shape) for shape in shapes]


def _halves(groups: Sequence[GroupLines], limits: Sequence[Limits]) -> list[list[Limits]]:
    """The heads of the site for which they are known least, in two; none where all are known."""
    sites = [
        (len(heads), group, site)
        for group, lines in enumerate(groups)
        if not lines.on_one_site
        for site, heads in enumerate(lines.heads)
    ]
    many, group, site = max(sites, default=(1, 0, 0))
    if many < 2:
        return []
    heads, halves = groups[group].heads[site], []
    for some in (heads[: many // 2], heads[many // 2 :]):
        mine = list(limits[group])
        mine[site] = int(some[0]), int(some[-1])
        halves.append([*limits[:group], tuple(mine), *limits[group + 1 :]])
    return halves
