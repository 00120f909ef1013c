"""The gain from each feature that a plan uses beyond Megatron's flags, by planning without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import Plan
from megatron_hexi.planner.features import features_of
from megatron_hexi.planner.layouts.trial import Progress
from megatron_hexi.planner.planner import find_plan
from megatron_hexi.planner.request import Request


@dataclass(frozen=True)
class FeatureAblation:
    """The speed without a feature that a plan uses.

    Args:
        feature: a field of `PlannerRules`.
        tokens_per_s_without: tokens/s of the best plan found without the feature; ``None``: none fits.
    """

    feature: str
    tokens_per_s_without: float | None


def ablate_features(
    request: Request, cluster: Cluster, plan: Plan, progress: Progress | None = None
) -> tuple[FeatureAblation, ...]:
    """Return the gain of each feature that a plan uses, by planning once more without that feature.

    Args:
        progress: callback, receives (phase, done, total).
    """
    gains = []
    for feature in features_of(plan):
        rules = replace(request.rules, **{feature: False})
        try:
            rate = find_plan(replace(request, rules=rules), cluster, progress=progress).cost.tokens_per_s
        except NothingFitsError:
            rate = None
        gains.append(FeatureAblation(feature, rate))
    return tuple(gains)
