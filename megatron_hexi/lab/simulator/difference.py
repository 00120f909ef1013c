"""Differences between a simulated iteration and the cost model's, with reasons seen in the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hexi.cost import IterationCost
from megatron_hexi.lab.simulator.simulation import Findings, Simulation
from megatron_hexi.lab.simulator.unit_program import FROM_EXPERTS, TO_EXPERTS

#: Part of the iteration below which a difference needs no reason.
_SAME = 0.002
#: Part of an iteration that sums in another order may leave.
_ROUNDING = 1e-12
#: Part of a layer below which groups or members count as simultaneous.
_CLOSE = 0.005
#: Part of the time below which shared links explain nothing.
_MEETING = 0.001
#: Most links that are named; a set of transfers often crosses many similar ones.
_NAMED = 2

#: Reasons where nothing above was seen, for shorter and for longer times.
_SMALL = (
    "units do not wait for each other where the model takes them to",
    "a link shared fairly is not always full, and who is served late makes others wait",
)

_MOVES = ("all-to-all in", "all-to-all out", TO_EXPERTS, FROM_EXPERTS)
_EXCHANGE = ("keys", "gradients")


@dataclass(frozen=True)
class PhaseComparison:
    """A phase in the cost model and in the simulator.

    Args:
        phase: a phase of `Phases`, or ``iteration``.
        why: the reason; empty where they agree.
    """

    phase: str
    model_s: float
    simulated_s: float
    why: str

    @property
    def difference_s(self) -> float:
        """Seconds by which the simulator exceeds the model."""
        return self.simulated_s - self.model_s


def compare_with_model(simulation: Simulation, cost: IterationCost) -> tuple[PhaseComparison, ...]:
    """Return the differences by phase, and last of the whole iteration."""
    model, simulated = cost.phases.by_name, simulation.phases.by_name
    least = _SAME * cost.iteration_s
    moves = simulated["all_to_all"] - model["all_to_all"]
    exchange = simulated["exchange"] - model["exchange"]
    traded = moves * exchange < 0 and min(abs(moves), abs(exchange)) > least
    rows = []
    for phase, seconds in model.items():
        more = simulated[phase] - seconds
        if max(seconds, simulated[phase]) <= _ROUNDING * cost.iteration_s:
            continue
        reasons: list[str] = []
        if abs(more) > least:
            reasons = list(_reasons(phase, more, simulation.findings)) or [_SMALL[more > 0]]
            if traded and phase in ("all_to_all", "exchange"):
                reasons.append("who is early in one of all-to-all and exchange waits longer in the other")
        rows.append(PhaseComparison(phase, seconds, simulated[phase], "; ".join(reasons)))
    return (*rows, _whole(rows, simulation, cost))


def _whole(rows: list[PhaseComparison], simulation: Simulation, cost: IterationCost) -> PhaseComparison:
    more = simulation.iteration_s - cost.iteration_s
    why = ""
    if abs(more) > _SAME * cost.iteration_s:
        # The phases with a difference of the same sign, the largest first.
        same = [row for row in rows if row.why and row.difference_s * more > 0]
        names = [row.phase for row in sorted(same, key=lambda row: -abs(row.difference_s))]
        why = f"mostly {' and '.join(name.replace('_', ' ') for name in names[:2])}"
    return PhaseComparison("iteration", cost.iteration_s, simulation.iteration_s, why)


def _reasons(phase: str, more: float, findings: Findings) -> Iterator[str]:
    if phase == "all_to_all":
        yield from _transfers(_MOVES, more, findings)
        if more < 0 and findings.unready > _CLOSE:
            yield (
                f"members of a group are ready up to {findings.unready:.1%} of a layer apart, and those that "
                "are begin without the last"
            )
    elif phase == "exchange":
        yield from _transfers(_EXCHANGE, more, findings)
        if more < 0 and findings.lead > _CLOSE:
            yield (
                "lags are made up in the next layer: groups do not wait for each other at a layer's end, and "
                f"end it up to {findings.lead:.1%} of a layer apart"
            )
    elif phase == "bubble":
        yield ("the model waits for all stages while a pipeline fills and drains, some hide behind others")
    elif phase == "pipeline":
        yield "sends hide in what a stage waits anyhow"
    elif phase == "gradients":
        layers, wires = ("shorter", "busier") if more > 0 else ("longer", "freer")
        yield f"the layers that hide them are {layers}, or their wires {wires}, than in the model"
    else:
        yield (
            "the model adds up the slowest group of each pass, the simulator follows the one with most to do "
            "through all of them"
        )


def _transfers(kinds: tuple[str, ...], more: float, findings: Findings) -> Iterator[str]:
    """Yield text on links where transfers meet though the model excludes it, or do not meet as it assumes."""
    if more > 0:
        met = [m for m in findings.meetings if set(kinds) & set(m.kinds) and m.share > _MEETING]
        for meeting in met[:_NAMED]:
            yield (
                f"{_spell(meeting.kinds)} share {meeting.link} for {meeting.share:.1%} of the time, and the "
                "model takes them never to meet"
            )
    else:
        apart = [s for s in findings.scatterings if s.kind in kinds]
        for scattering in sorted(apart, key=lambda s: -s.spared_s)[:_NAMED]:
            yield (
                f"the model counts {scattering.counted} transfers of {scattering.kind} on "
                f"{scattering.link} as all together, and at most {scattering.met} share it at a time"
            )


def _spell(kinds: tuple[str, ...]) -> str:
    if len(kinds) == 1:
        return f"{kinds[0]} of different steps or layers"
    return f"{', '.join(kinds[:-1])} and {kinds[-1]}"
