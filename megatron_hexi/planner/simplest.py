"""Chooses the simplest of plans that take about as long: the one with the fewest means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_hexi.cluster import Cluster
from megatron_hexi.planner.features import means_of
from megatron_hexi.planner.layouts.trial import Candidate

#: Parts of an iteration by which a plan may take longer than the fastest if it has fewer means: less than the
#: cost model can tell, and as much as a user may give for it who asks for the simplest plan.
ABOUT_AS_FAST: Final = 0.01
SIMPLEST: Final = 0.05


@dataclass(frozen=True, eq=False)
class Alternative:
    """A plan beside the chosen one, with its means in words."""

    candidate: Candidate
    means: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan that is chosen, and the plans that are faster or simpler.

    Args:
        means: the chosen plan's means in words, see `means_of`.
        fastest: the fastest plan; ``None``: it is the chosen one.
        simplest: the plan with the fewest means that takes at most the part `SIMPLEST` longer than the
            fastest; ``None``: the chosen one has as few, or the fastest was asked for.
    """

    chosen: Candidate
    means: tuple[str, ...]
    fastest: Alternative | None
    simplest: Alternative | None


def choose(fastest: Candidate, tried: Sequence[Candidate], cluster: Cluster, within: float) -> Choice:
    """Return the plan with the fewest means that takes at most the part `within` longer than the fastest.

    If several have as few, the fastest of these is taken.

    Args:
        tried: other plans that fit.
    """
    most_s = (1 + max(within, SIMPLEST)) * fastest.iteration_s
    near = [fastest, *(plan for plan in tried if plan.iteration_s <= most_s)]
    ranked = [Alternative(plan, means_of(plan.plan, cluster)) for plan in near]

    def simplest(part: float) -> Alternative:
        most_s = (1 + part) * fastest.iteration_s
        return min(
            (one for one in ranked if one.candidate.iteration_s <= most_s),
            key=lambda one: (len(one.means), one.candidate.iteration_s),
        )

    chosen, simpler = simplest(within), simplest(SIMPLEST)
    return Choice(
        chosen.candidate,
        chosen.means,
        None if chosen is ranked[0] else ranked[0],
        simpler if within > 0 and len(simpler.means) < len(chosen.means) else None,
    )
