"""CP-SAT on a balanced grouping: whole tokens and heads together, under memory, with a proof.

Scaling (balance.py) settles tokens and heads one after the other. Where a member's memory must hold both, or
one head more here allows fewer tokens there, they have to be found together. Times are those that the cost
model measured at the layout given: in proportion to a member's tokens (x), to its group's tokens (y,
all-to-alls), to its heads times its group's tokens (z, attention). For each group of a replica with m
micro-batches

    m (x + y + z) <= T,    x >= t_i T_i,    z >= e_i h_i G,    sum T_i = G,    sum h_i = H,    bytes_i <=
    memory_i

and T is least. h_i G is linear for a given h_i, so each of the few values near the present ones has a
Boolean. Symmetry is broken by kind: groups of the same kinds of units share one set of variables; in a group,
units of a kind have the same tokens, and what is chosen is how many of them have h heads. The layout given is
a complete hint and an upper bound; one worker, a fixed seed and a limit on deterministic time give the same
answer everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.measured import UnitTimes
from megatron_hexi.planner.layouts.trial import Judge, Trial

#: The seed of every solver, which plans record.
SEED = 1


def repeatable_solver(effort: float) -> cp_model.CpSolver:
    """Return a solver with one worker, a fixed seed, and a limit of its work rather than of its seconds.

    Args:
        effort: the most deterministic time of a solution, roughly seconds.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = effort
    # OR-Tools 9.15's search for symmetries ends the process at some models with two constraints on the same
    # sum ("Check failed: context_->VarToConstraints(var).empty()"). Models this small gain nothing by it.
    solver.parameters.symmetry_level = 0
    return solver


#: Limit in CP-SAT's own unit, about seconds; only the hardest groupings reach it.
_DETERMINISTIC_TIME = 0.02
#: The largest change of a member's heads that is tried.
_HEADS_AROUND = 2
#: CP-SAT stops when nothing can be better by more than this part.
_GAP = 2e-4
#: CP-SAT's integers are such parts of the present time, and of a GPU's memory: finer than either is known.
_PARTS = 2**24


@dataclass(frozen=True, eq=False)
class CpSatResult:
    """The result of CP-SAT on a trial.

    Args:
        trial: the better of the given trial and the one that CP-SAT found.
        proven: whether it is proven that this grouping has nothing better, if times are proportional to work.
    """

    trial: Trial
    proven: bool


def refine(judge: Judge, trial: Trial) -> CpSatResult:
    """Return a balanced trial improved by CP-SAT, which finds tokens and heads together."""
    build = _Build(trial)
    replicas = [build.add_replica(layout) for layout in trial.layouts]
    solver = repeatable_solver(_DETERMINISTIC_TIME)
    solver.parameters.relative_gap_limit = _GAP
    # Products are linear given their Boolean: the relaxation proves in 10 ms what takes the search 100 ms.
    solver.parameters.linearization_level = 2
    build.model.minimize(build.limit)
    status = solver.solve(build.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CpSatResult(trial, proven=False)
    layouts = [
        _layout(layout, classes, solver) for layout, classes in zip(trial.layouts, replicas, strict=True)
    ]
    proven = status == cp_model.OPTIMAL
    if layouts == list(trial.layouts):
        return CpSatResult(trial, proven)
    solved = judge.try_out(trial.fleet, layouts, trial.window)
    return CpSatResult(solved if solved.order < trial.order else trial, proven)


@dataclass(frozen=True, eq=False)
class _MemberKind:
    """Equal members of a group: positions, tokens of each, and for each h the number with h heads."""

    positions: Sequence[int]
    tokens: cp_model.IntVar
    counts: Mapping[int, cp_model.IntVar]


@dataclass(frozen=True, eq=False)
class _Class:
    """Groups of the same kinds of units: their places in the layout, and their variables."""

    places: Sequence[int]
    kinds: Sequence[_MemberKind]


class _Build:
    """Builds the CP-SAT model that chooses tokens and heads of every unit, from a candidate layout."""

    def __init__(self, trial: Trial) -> None:
        self.model = cp_model.CpModel()
        self._trial = trial
        self._measured = UnitTimes.of(trial)
        self._all_heads = trial.fleet.job.workload().local_heads
        self._sequence = trial.fleet.job.seq_length
        self._longest = max(
            layout.micro_batches * self._busy(part) for layout in trial.layouts for part in layout.parts
        )
        self.limit = self.model.new_int_var(0, _PARTS, "T")
        self.model.add_hint(self.limit, _PARTS)

    def add_replica(self, layout: Layout) -> list[_Class]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, part in enumerate(layout.parts):
            alike.setdefault(tuple(self._trial.fleet.units[unit].kind for unit in part.units), []).append(
                number
            )
        classes, held = [], []
        for places in alike.values():
            # All groups get the hint of the smallest, which is then within every limit.
            part = min((layout.parts[place] for place in places), key=lambda part: part.total)
            group = self.model.new_int_var(0, self._sequence, "G")
            self.model.add_hint(group, part.total)
            held.append((len(places), part.total, group))
            classes.append(self._add_class(part, places, group, layout.micro_batches))
        # Groups that are alike differ by a few tokens in the layout given; the hint must not fall short.
        hinted = sum(count * tokens for count, tokens, _ in held)
        self.model.add(sum(count * group for count, _, group in held) >= hinted)
        return classes

    def _add_class(
        self, part: A2AGroup, places: Sequence[int], group: cp_model.IntVar, micro_batches: int
    ) -> _Class:
        model, measured = self.model, self._measured
        token_time, attention_time = (model.new_int_var(0, _PARTS, name) for name in "xz")
        scale = micro_batches * _PARTS / self._longest
        units = list(part.units)
        total = max(1, part.total)
        model.add_hint(token_time, int(scale * measured.token[units].max()))
        model.add_hint(attention_time, int(scale * measured.attention[units].max()))
        move = int(scale * measured.all_to_all[units].max() / total)
        model.add(token_time + attention_time + move * group <= self.limit)
        positions: dict[int, list[int]] = {}
        for position, unit in enumerate(units):
            positions.setdefault(self._trial.fleet.units[unit].kind, []).append(position)
        kinds = [
            self._add_kind(part, alike, group, token_time, attention_time, scale)
            for alike in positions.values()
        ]
        model.add(sum(kind.tokens * len(kind.positions) for kind in kinds) >= group)
        model.add(
            sum(heads * count for kind in kinds for heads, count in kind.counts.items()) == self._all_heads
        )
        return _Class(places, kinds)

    def _add_kind(
        self,
        part: A2AGroup,
        positions: Sequence[int],
        group: cp_model.IntVar,
        token_time: cp_model.IntVar,
        attention_time: cp_model.IntVar,
        scale: float,
    ) -> _MemberKind:
        """Add the units of a kind; for given heads, attention and memory are linear in the group's tokens."""
        model, measured, total = self.model, self._measured, max(1, part.total)
        most = max(positions, key=lambda position: part.heads[position])
        unit, most_heads = part.units[most], part.heads[most]
        tokens = max(part.tokens[position] for position in positions)
        held = model.new_int_var(0, self._sequence, "t")
        model.add_hint(held, tokens)
        if tokens:
            slowest = max(float(measured.token[part.units[position]]) for position in positions)
            model.add(int(scale * slowest / tokens) * held <= token_time)
        else:
            model.add(held == 0)
        # The attention time of members without heads is unknown.
        lowest = max(0, min(part.heads[position] for position in positions) - _HEADS_AROUND)
        highest = min(self._all_heads, most_heads + _HEADS_AROUND) if most_heads else 0
        room = max(min(float(measured.free[part.units[position]]) for position in positions), 1.0)
        each = measured.attention[unit] / max(1, most_heads) / total
        bytes_each = measured.inside[unit] / max(1, most_heads) / total
        counts = {}
        for heads in range(lowest, highest + 1):
            present = sum(part.heads[position] == heads for position in positions)
            count = model.new_int_var(0, len(positions), "n")
            used = model.new_bool_var("n>0")
            model.add_hint(count, present)
            model.add_hint(used, present > 0)
            model.add(count == 0).only_enforce_if(~used)
            model.add(int(scale * each * heads) * group <= attention_time).only_enforce_if(used)
            if np.isfinite(room):
                by_tokens, by_group = (
                    int(_PARTS * size / room) for size in (measured.token_bytes, bytes_each * heads)
                )
                model.add(by_tokens * held + by_group * group <= _PARTS).only_enforce_if(used)
            counts[heads] = count
        model.add(sum(counts.values()) == len(positions))
        return _MemberKind(positions, held, counts)

    def _busy(self, part: A2AGroup) -> float:
        measured, units = self._measured, list(part.units)
        return float(
            measured.token[units].max() + measured.all_to_all[units].max() + measured.attention[units].max()
        )


def _layout(layout: Layout, classes: Sequence[_Class], solver: cp_model.CpSolver) -> Layout:
    """Return the layout of the solution; remainders are assigned in proportion."""
    parts = list(layout.parts)
    for group_class in classes:
        tokens, heads = ([0] * len(parts[group_class.places[0]].units) for _ in range(2))
        for kind in group_class.kinds:
            dealt = [count for count, number in kind.counts.items() for _ in range(solver.value(number))]
            for position, count in zip(kind.positions, sorted(dealt, reverse=True), strict=True):
                tokens[position], heads[position] = solver.value(kind.tokens), count
        for place in group_class.places:
            parts[place] = replace(parts[place], tokens=tuple(tokens), heads=tuple(heads))
    if not any(part.total for part in parts):  # there are fewer tokens than equal groups
        return layout
    sequence = sum(part.total for part in layout.parts)
    return replace(layout, parts=tuple(parts)).with_tokens(sequence, [float(part.total) for part in parts])
