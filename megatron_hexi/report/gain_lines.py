"""The gain of a plan from each feature that Megatron's flags lack, and from weak kinds of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

if TYPE_CHECKING:  # brings the solver, which a report does not need
    from megatron_hexi.planner import FeatureAblation, Planned, WeakKind


def gains_report(planned: Planned, gains: Sequence[FeatureAblation]) -> RenderableType:
    """Return a line for each feature: the best plan without it, and the option that asks for that."""
    if not gains:
        return Text("gains: the plan is one of Megatron's own flags")
    return Group(*(Text(_line(planned, gain)) for gain in gains))


def gains_dict(planned: Planned, gains: Sequence[FeatureAblation]) -> list[dict[str, Any]]:
    """Return the gains as plain values: tokens/s, and the relative speed-up."""
    return [vars(gain) | {"gain": _gain(planned, gain)} for gain in gains]


def weak_report(planned: Planned, weak: Sequence[WeakKind]) -> Group:
    """Return a line for each weak kind of GPU: the best plan without it."""
    return Group(*(Text(_weak_line(planned, kind)) for kind in weak))


def _weak_line(planned: Planned, kind: WeakKind) -> str:
    more = planned.cost.tokens_per_s / kind.tokens_per_s_without - 1
    without = f"without them {kind.tokens_per_s_without:,.0f} tokens/s"
    return f"the {kind.gpus} {kind.name} bring {more:.1%}: {without}"


def _gain(planned: Planned, gain: FeatureAblation) -> float | None:
    rate = gain.tokens_per_s_without
    return None if rate is None else planned.cost.tokens_per_s / rate - 1


def _line(planned: Planned, gain: FeatureAblation) -> str:
    name, option = gain.feature.replace("_", " "), f"--no-{gain.feature.replace('_', '-')}"
    more = _gain(planned, gain)
    if gain.tokens_per_s_without is None or more is None:
        return f"gain by {name}: without, no plan was found that fits ({option})"
    return f"gain by {name}: {more:.1%}; without, {gain.tokens_per_s_without:,.0f} tokens/s ({option})"
