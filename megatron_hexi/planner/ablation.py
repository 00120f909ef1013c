"""The gain from each feature that a plan uses, and from each weak kind of GPU, by planning without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.plan import Plan
from megatron_hexi.planner.features import features_of
from megatron_hexi.planner.layouts.trial import Progress
from megatron_hexi.planner.notes import gpus_of
from megatron_hexi.planner.planner import find_plan
from megatron_hexi.planner.request import Request

#: The job is planned without a kind that has less than this share of the cluster's speed, for at most so many
#: such kinds: each takes as long as the plan itself.
_SMALL, _MOST_KINDS = 0.08, 2


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


@dataclass(frozen=True)
class WeakKind:
    """A kind of GPU that a plan uses, and the speed without it.

    Args:
        gpus: number of such GPUs that the plan uses.
        tokens_per_s_without: tokens/s of the best plan found that uses none of them.
    """

    name: str
    gpus: int
    tokens_per_s_without: float


def weak_kinds(
    request: Request, cluster: Cluster, plan: Plan, progress: Progress | None = None
) -> tuple[WeakKind, ...]:
    """Plan once without each kind of GPU that adds little speed; return these kinds, the weakest first.

    Args:
        progress: callback, receives (phase, done, total).
    """
    job = replace(request.job, recompute="none", pipeline_parallel=1)

    def speed(kind: str | None) -> float:
        return ceiling_tokens_per_s(
            job, [rank.device for rank in cluster.ranks if kind in (None, rank.device.name)]
        )

    used = [cluster.ranks[gpu].device.name for gpu in gpus_of(plan, cluster)]
    shares = {name: speed(name) / speed(None) for name in dict.fromkeys(used)}
    small = sorted((share, name) for name, share in shares.items() if share <= _SMALL)
    weak = []
    for _, name in small[:_MOST_KINDS]:
        nodes = [number for number, node in enumerate(cluster.nodes) if node.device.name == name]
        try:
            rate = find_plan(request, cluster.without(nodes), progress=progress).cost.tokens_per_s
        except HexiError:  # nothing fits, or the other nodes have no units of a fixed size
            continue
        weak.append(WeakKind(name, used.count(name), rate))
    return tuple(weak)
