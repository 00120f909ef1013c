"""Weak kinds of GPU: the job planned without each kind that has a small share of the speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, ceiling_tokens_per_s
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.notes import gpus_of
from megatron_hexi.planner.request import Request

#: The job is planned without a kind that has less than this share of the cluster's speed; the most such
#: kinds, and the most GPUs of the cluster, since each takes as long as the plan itself.
_SMALL, _MOST_KINDS, _MOST_GPUS = 0.08, 2, 128
#: Kinds without which an iteration takes longer by less than this share are noted.
_LITTLE = 0.06


@dataclass(frozen=True)
class WeakKind:
    """A kind of GPU that a plan uses, and the best plan without it.

    Args:
        gpus: number of such GPUs that the plan uses.
        without: the best plan found that uses none of them.
    """

    name: str
    gpus: int
    without: Candidate


def weak_kinds(
    request: Request, cluster: Cluster, best: Candidate, search: Callable[[Cluster], Candidate | None]
) -> tuple[list[WeakKind], int]:
    """Plan without each kind of GPU that has a small share of the cluster's speed.

    Args:
        search: returns the best plan on a cluster with some of the nodes; ``None``: none is found.

    Returns:
        The kinds that a plan was found without, the weakest first, and how many layouts were timed here.
    """
    job = replace(request.job, recompute="none", pipeline_parallel=1)
    names = list(dict.fromkeys(node.device.name for node in cluster.nodes))
    if len(names) < 2 or len(cluster.ranks) > _MOST_GPUS:
        return [], 0

    def speed(kind: str | None) -> float:
        return ceiling_tokens_per_s(
            job, [rank.device for rank in cluster.ranks if kind in (None, rank.device.name)]
        )

    used = [cluster.ranks[gpu].device.name for gpu in gpus_of(best.plan, cluster)]
    shares = {name: speed(name) / speed(None) for name in names if name in used}
    weak = []
    for name in sorted(shares, key=lambda name: (shares[name], name))[:_MOST_KINDS]:
        if shares[name] > _SMALL:
            break
        nodes = [number for number, node in enumerate(cluster.nodes) if node.device.name == name]
        try:
            plan = search(cluster.without(nodes))
        except HexiError:  # the other nodes have no units of a fixed size
            continue
        if plan is not None:
            weak.append(WeakKind(name, used.count(name), _on_all(plan, cluster, set(nodes))))
    return weak, len(weak)


def _on_all(plan: Candidate, cluster: Cluster, left_out: set[int]) -> Candidate:
    """Return a plan for some nodes as a plan for the whole cluster."""
    kept = [gpu for gpu, rank in enumerate(cluster.ranks) if rank.node not in left_out]
    own = rank_gpus(plan.plan, len(kept))
    whole = replace(plan.plan, gpus=tuple(kept[gpu] for gpu in own))
    return Candidate(whole, plan.job, CostModel(plan.job, cluster).timing(whole))


def spell_weak(kinds: Sequence[WeakKind], best: Candidate) -> tuple[str, ...]:
    """Return notes on the kinds of GPU that shorten an iteration by little."""
    notes = []
    for kind in sorted(kinds, key=lambda kind: order_of(kind.without)):
        brings = kind.without.iteration_s / best.iteration_s - 1
        if 0 < brings < _LITTLE:
            notes.append(
                f"the {kind.gpus} {kind.name} bring {brings:.1%}: without them "
                f"{kind.without.tokens_per_s:,.0f} tokens/s"
            )
    return tuple(notes)
