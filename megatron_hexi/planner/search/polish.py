"""Small changes of a layout, each kept if it is faster.

Where links bound a plan, time is not proportional to work and scaling does not find the best. Then groups
that are alike are together given more or fewer tokens, by ever smaller steps; other windows and the
reverse nesting are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.deal import assign_tokens
from megatron_hexi.planner.layouts.layout import Layout
from megatron_hexi.planner.layouts.orders import in_a_row
from megatron_hexi.planner.layouts.trial import Judge, Trial

_WINDOWS = (1, 2, 3, 4, 6, 8)
#: Up to this many groups, each is changed by itself.
_FEW = 5
#: Up to this many groups, all orders are tried; of more groups only the reverse.
_VERY_FEW = 3
#: Steps by which shares are changed, the largest first.
_STEPS = (1.0, 0.3, 0.1, 0.03, 0.01)
#: Steps are worth trying up to this multiple of communication's share of the iteration.
_LEVERAGE = 5.0


def polish(judge: Judge, trial: Trial, budget: int) -> Trial:
    """Return the best layout found by at most `budget` more trials."""
    end = judge.trials + budget

    def keep(layout: Layout, window: int) -> bool:
        nonlocal trial
        if judge.trials >= end:
            return False
        changed = judge.try_out(trial.fleet, [layout], window)
        better = changed.order < trial.order
        trial = changed if better else trial
        return better

    if len(trial.layouts[0].parts) > 1:
        for window in _other_windows(trial):
            if not keep(trial.layouts[0], window):
                break
        layout = trial.layouts[0]
        orders = (
            itertools.permutations(layout.parts) if len(layout.parts) <= _VERY_FEW else [layout.parts[::-1]]
        )
        for parts in orders:
            if parts != layout.parts:
                keep(replace(layout, parts=tuple(parts)), trial.window)
        layout = trial.layouts[0]
        plain = replace(layout, parts=in_a_row(layout.parts))
        if plain != layout:
            keep(plain, trial.window)
    for step in _worthwhile_steps(trial):
        for change in _changes(trial.fleet, trial.layouts[0]):
            for factor in (1 + step, 1 / (1 + step)):
                while keep(change(trial.layouts[0], factor), trial.window):
                    pass
    return trial


def _other_windows(trial: Trial) -> Iterator[int]:
    """Yield larger windows while they are faster; smaller windows where memory is short.

    A larger window never makes a layout slower, nor a smaller one faster.
    """
    if not trial.fits:
        yield from (window for window in reversed(_WINDOWS) if window < trial.window)
    elif trial.timing.phases.exchange > 0:
        most = len(trial.layouts[0].parts)
        yield from (window for window in _WINDOWS if trial.window < window < most)


def _worthwhile_steps(trial: Trial) -> list[float]:
    """Return the relative changes of tokens to try: none far larger than communication's share of time."""
    phases = trial.timing.phases
    return [step for step in _STEPS if step <= _LEVERAGE * phases.communication / phases.total]


_Change = Callable[[Layout, float], Layout]


def _changes(fleet: Fleet, layout: Layout) -> Iterator[_Change]:
    """Yield changes of the tokens of a class of groups, then of a kind of unit inside its groups.

    If groups are few, each is a class of its own: outer groups receive other messages than inner ones.
    """
    classes = [fleet.kinds_of(part.units) for part in layout.parts]
    alone = len(classes) <= _FEW
    names = [(number if alone else 0, kinds) for number, kinds in enumerate(classes)]
    for name in dict.fromkeys(names):
        places = [number for number, class_name in enumerate(names) if class_name == name]
        if len(places) < len(classes):
            yield partial(_scale_groups, places)
    for kinds in dict.fromkeys(classes):
        if len(set(kinds)) > 1:
            for kind in sorted(set(kinds))[:-1]:
                yield partial(_scale_kind, fleet, kind)


def _scale_groups(places: Sequence[int], layout: Layout, factor: float) -> Layout:
    totals = [part.total for part in layout.parts]
    weights = [total * (factor if place in places else 1.0) for place, total in enumerate(totals)]
    return layout.with_tokens(sum(totals), weights)


def _scale_kind(fleet: Fleet, kind: int, layout: Layout, factor: float) -> Layout:
    parts = []
    for part in layout.parts:
        weights = np.array(part.tokens, dtype=float) + 1e-9
        weights[[fleet.units[unit].kind == kind for unit in part.units]] *= factor
        parts.append(replace(part, tokens=assign_tokens(part.total, weights)))
    return replace(layout, parts=tuple(parts))
