"""Notes about a plan, a sentence each: savings of memory and time, idle GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import IterationCost
from megatron_hexi.plan import Plan
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.features import features_of
from megatron_hexi.planner.joint import Candidate


def why_saved(plan: Plan, seconds: float, unsaved_s: float) -> tuple[str, ...]:
    """Return a note on how the plan saves memory or time, and by how much; empty if it is no faster.

    Args:
        unsaved_s: seconds of the best layout's iteration without these savings; infinite: none fits.
    """
    what = spell_savings(plan)
    if seconds >= unsaved_s or not what:
        return ()
    without = "no layout was found that fits"
    if unsaved_s < math.inf:
        flags = [spell_flag(one, False) for one in features_of(plan) if one in ("ministages", "offload")]
        plainer = f" (plan with {' '.join(flags)})" if flags else ""
        without = f"the best layout takes {unsaved_s / seconds - 1:.1%} longer{plainer}"
    return (f"{what}: without that {without}",)


def spell_savings(plan: Plan) -> str:
    """Return, in words, the features of a plan that the joint search does not use; empty if there are none.

    These are ministages, offload, uneven shares of optimizer state, and micro-batches divided by sample.
    """
    stages = plan.stages
    words = []
    for order, parts in ((None, "ministages"), ("interleaved", "interleaved ministages")):
        own = [replica.ministages for replica in plan.replicas if replica.order == order]
        counts = sorted({count for count in own if count is not None})
        if counts:
            words.append(f"stages run in {' or '.join(map(str, counts))} {parts}")
    names = {"parameters": "weights and gradients", "optimizer": "optimizer state", "activations": "rows"}
    moved = [text for name, text in names.items() if any(name in (stage.offload or ()) for stage in stages)]
    if moved:
        words.append(f"host memory holds {' and '.join(moved)}")
    shares = {member.state for stage in stages for member in stage.members}
    if len(shares) > 1:
        words.append("GPUs with more memory keep more of the optimizer's state")
    if any(len(stage.domains) > 1 for stage in stages):
        words.append("GPUs of a stage take samples of each micro-batch")
    return ", ".join(words)


def margin_note(cost: IterationCost, margin: float) -> tuple[str, ...]:
    """Return a warning if the plan keeps less than `margin`, a share of usable memory, free; else empty."""
    fullest = max(cost.ranks, key=lambda rank: rank.memory_gib / rank.usable_gib)
    free = 1 - fullest.memory_gib / fullest.usable_gib
    if free >= margin - 1e-9:
        return ()
    warning = (
        f"no plan was found that keeps {margin:.0%} of usable memory free: this one leaves {free:.1%} on "
        f"{fullest.name} ({fullest.memory_gib:.1f} of {fullest.usable_gib:.1f} GiB) and may run out of memory"
    )
    return (warning,)


def left_out(best: Candidate, cluster: Cluster, tried: Sequence[Candidate]) -> tuple[str, ...]:
    """Return a note on GPUs without work, with the time of plans that use more GPUs; empty if all work."""
    used = gpus_of(best.plan, cluster)
    idle = [gpu for gpu in range(len(cluster.ranks)) if gpu not in used]
    if not idle:
        return ()
    names = ", ".join(cluster.rank_name(gpu) for gpu in idle[:4])
    more = f" and {len(idle) - 4} more" if len(idle) > 4 else ""
    larger = [
        candidate.iteration_s for candidate in tried if len(gpus_of(candidate.plan, cluster)) > len(used)
    ]
    why = "no plan with them was among those that were timed and fit"
    if larger:
        longer = min(larger) / best.iteration_s - 1
        more_or_less = f"{longer:.1%} longer" if longer >= 0 else f"{-longer:.1%} less time"
        why = f"the fastest plan with more GPUs that was tried takes {more_or_less}"
    return (f"{len(idle)} of {len(cluster.ranks)} GPUs left out ({names}{more}): {why}",)


def gpus_of(plan: Plan, cluster: Cluster) -> set[int]:
    """Return the cluster's GPUs that a plan uses."""
    return set(rank_gpus(plan, len(cluster.ranks)))
