"""Checks ``--hexi-replan-interval`` and related flags against the job before anything is allocated."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_hexi.elastic.store import in_round
from megatron_hexi.errors import HexiError
from megatron_hexi.options.layer_features import layer_features
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import domain_rows

_FLAG = "--hexi-replan-interval"


def check_replanning(args: Namespace, plan: Plan) -> None:
    """Refuse a job that cannot be re-planned."""
    interval, cluster = args.hexi_replan_interval, args.hexi_cluster
    if interval is None:
        if cluster is not None and not in_round():
            raise HexiError(
                f"--hexi-cluster {cluster}: is for re-planning; add {_FLAG} 10, or leave --hexi-cluster out"
            )
        return
    what = f"{_FLAG} {interval}"
    if interval < 2:
        raise HexiError(f"{what}: a number of iterations between looks; give 2 or more, as 10")
    if not 0 <= args.hexi_replan_threshold < 1:
        raise HexiError(
            f"--hexi-replan-threshold {args.hexi_replan_threshold}: is a part of an iteration's time; "
            "give 0 to below 1, as 0.03"
        )
    if cluster is None:
        raise HexiError(f"{what}: the planner needs the machines; give --hexi-cluster cluster.yaml too")
    if not Path(cluster).is_file():
        raise HexiError(f"--hexi-cluster {cluster}: no such file; give the cluster file of the plan")
    if not in_round() and not can_move(plan):
        raise HexiError(
            f"{what}: {args.hexi_plan} has no second unit to which tokens, heads or samples could move; "
            f"leave {_FLAG} out"
        )
    layer_features(args, what)  # refuses layers whose weights are not counted
    if getattr(args, "cuda_graph_impl", "none") not in ("none", None):
        raise HexiError(f"{what}: --cuda-graph-impl fixes the rows of a rank; leave out one of the two")


def can_move(plan: Plan) -> bool:
    """Whether tokens, heads, samples or micro-batches of a plan can move to other units without weights."""
    rows = domain_rows(plan)
    shares = any(row.domain.samples is not None for row in rows)
    replicas = len(plan.replicas) > 1 and rows[0].layers is not None and not plan.takes_micro_batches
    return shares or replicas or any(len(row.domain.members) > 1 for row in rows)
