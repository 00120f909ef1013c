"""The plan for the nodes that are present: the job's own while all of its nodes are there, else the best.

The command line is the same in every round, so what it says must not change. Where stages would contradict
it, plans have none of their own.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from megatron_hexi.cluster import ANYTHING, MEMORY_MARGIN, Cluster, PlannerRules, cluster_digest
from megatron_hexi.elastic.planning.node import find_node
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Model, job_of_plan, job_terms
from megatron_hexi.models.megatron_arguments import model_from_arguments, read_arguments, terms_from_arguments
from megatron_hexi.options.job_terms import CHUNK_FLAGS, PARALLEL_SIZES, STAGE_FLAGS, vocabulary_step
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import domain_rows, job_ranks, rank_gpus
from megatron_hexi.planner import CHOSEN, Planned, Request, find_plan, plan_of_whole
from megatron_hexi.shell.words import unplaced

COMMAND_LINE = Path("the job's command line")
#: Terms that are a plan's own, whatever the command line says.
_SIZES = ("seq_length", "tensor_parallel", "data_parallel")
#: Terms that may differ between plans of one job.
_CHANGED = ("micro_batch_size", "pipeline_parallel", "virtual_stages", "recompute", "sequence_parallel")


@dataclass(frozen=True)
class LastingJob:
    """A job that is re-planned when its nodes change.

    Args:
        first: the plan of the job's command line.
        stages: number of pipeline stages of the job under `first`, if that plan has a repeated stage.
    """

    first: Plan
    request: Request
    stages: int

    def written(self, planned: Planned) -> Plan:
        """Return a plan that was found, with the terms that the job's command line leaves to it."""
        plan = planned.plan
        terms = job_terms({name: getattr(planned.job, name) for name in _CHANGED}, plan)
        changed = {name: getattr(terms, name) for name in _CHANGED}
        if terms.virtual_stages == 1:  # Megatron's default
            changed["virtual_stages"] = None
        if "recompute" in self.request.fixed:  # the command line says it, perhaps more exactly
            changed["recompute"] = self.first.job.recompute
            plan = _without_recompute(plan)
        elif any(row.recompute is not None for row in domain_rows(plan)):  # its stages say it
            changed["recompute"] = None
        return replace(plan, job=replace(self.first.job, **changed))


def lasting_job(first: Plan, words: Sequence[str], cluster: Cluster) -> LastingJob:
    """Return the job of a command line under its own plan."""
    own = unplaced(words)
    args, given = read_arguments(own, COMMAND_LINE)
    model, terms = model_from_arguments(own, COMMAND_LINE), terms_from_arguments(own, COMMAND_LINE)
    # What the plan states is so: ranks refuse a command line that says otherwise.
    stated = {
        name: value
        for name, value in terms.fields.items()
        if name not in _SIZES and getattr(first.job, name, None) is None
    }
    if not args.sequence_parallel and first.job.sequence_parallel is None:
        stated["sequence_parallel"] = max(len(member.ranks) for member in first.members) == 1
    job = replace(job_of_plan(first, model, **stated), latent_exchange=False, virtual_stages=1)
    fixed = {name for name in CHOSEN if name in terms.fields}
    if model.experts is not None:  # balancing losses of experts are means over a micro-batch
        fixed.add("micro_batch_size")
    rules = _rules(terms.restricting, _fixed_by(given, model) is not None)
    request = Request(job, frozenset(fixed), MEMORY_MARGIN, rules, virtual_stages=_chunks(args, given))
    _check_vocabulary(request, vocabulary_step(first, model.vocab_multiple), args.padded_vocab_size, cluster)
    return LastingJob(first, request, job.pipeline_parallel)


def _chunks(args: Namespace, given: frozenset[str]) -> int:
    """Return the chunks of a stage's layers, which stay: those of the command line, or one."""
    by_number, by_layers = CHUNK_FLAGS
    if by_layers in given:
        raise HexiError(f"{by_layers}: plans for the remaining nodes may have other stages; give {by_number}")
    return args.num_virtual_stages_per_pipeline_rank if by_number in given else 1


def _fixed_by(given: frozenset[str], model: Model) -> str | None:
    """Return a flag that stages with layers of their own would contradict; ``None`` if no flag does."""
    flag = next((flag for flag in (*PARALLEL_SIZES, *STAGE_FLAGS) if flag in given), None)
    if flag is not None and model.experts is not None:
        raise HexiError(
            f"{flag}: plans of a model with experts say the sizes of each stage; leave {flag} out"
        )
    return flag


def _rules(restricting: Mapping[str, tuple[str, ...]], has_sizes: bool) -> PlannerRules:
    rules = ANYTHING
    for feature in {feature for features in restricting.values() for feature in features}:
        rules = replace(rules, **{feature: False})
    return replace(rules, unequal_stages=False) if has_sizes else rules


def _check_vocabulary(request: Request, step: int, padded: int | None, cluster: Cluster) -> None:
    """Refuse an embedding whose rows other tensor-parallel sizes cannot cut."""
    widest = max(len(node.ranks) for node in cluster.nodes)
    needed = math.lcm(*request.widths(widest))
    rows = padded or step
    if rows % needed:
        flag = "--padded-vocab-size" if padded else "--make-vocab-size-divisible-by"
        raise HexiError(
            f"{flag} {rows}: plans for the remaining nodes may cut the embedding in {needed}; give a "
            f"multiple of {needed}"
        )


def _without_recompute(plan: Plan) -> Plan:
    replicas = (
        replace(replica, stages=tuple(replace(stage, recompute=None) for stage in replica.stages))
        for replica in plan.replicas
    )
    return replace(plan, replicas=tuple(replicas))


@dataclass(frozen=True)
class Survivors:
    """The plan that a job continues with after a node failure.

    Args:
        plan: plan for the present nodes; `gpus` counts in the whole cluster.
        ranks: the started rank that takes each of the plan's ranks.
    """

    plan: Plan
    ranks: tuple[int, ...]
    left_out: tuple[str, ...]


def survive(
    plan: Plan,
    cluster: Cluster,
    present: Sequence[tuple[str, int]],
    words: Sequence[str],
    speeds: Mapping[int, float] | None = None,
) -> Survivors:
    """Return a plan for the nodes that are present.

    Args:
        present: node in the cluster file, and number there, of each started rank.
        speeds: measured speed of GPUs, as parts of what the cluster file says; 1 where it is not known.
    """
    starts, job = _starts(cluster, present), lasting_job(plan, words, cluster)
    if plan.provenance and plan.provenance.cluster_digest not in (None, cluster_digest(cluster)):
        raise HexiError(
            f"--hexi-plan was made for a different cluster than that of --hexi-cluster, {cluster.name}; "
            "give --hexi-cluster the file that the plan was made for"
        )
    gpus = rank_gpus(plan, job_ranks(plan, job.stages))
    numbers = {cluster.ranks[gpu].node for gpu in starts}
    if not starts.keys() >= set(gpus):
        others = set(range(len(cluster.nodes))).difference(numbers)
        now = cluster.at_speeds(_node_speeds(cluster, speeds or {}))
        found = job.written(find_plan(job.request, now.without(others)))
        plan = plan_of_whole(found, cluster, others)
    absent = sorted({cluster.ranks[gpu].node for gpu in gpus}.difference(numbers))
    names = tuple(cluster.nodes[number].name for number in absent)
    return Survivors(plan, tuple(starts[gpu] for gpu in rank_gpus(plan, len(gpus))), names)


def _node_speeds(cluster: Cluster, speeds: Mapping[int, float]) -> dict[int, float]:
    """Return the mean speed of its node's GPUs for each GPU: the planner wants nodes of equal GPUs."""
    return {
        gpu: fmean(speeds.get(one, 1.0) for one in node.ranks) for node in cluster.nodes for gpu in node.ranks
    }


def _starts(cluster: Cluster, present: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Return the started rank of each GPU, by the GPU's number in the cluster."""
    starts: dict[int, int] = {}
    for rank, (name, local) in enumerate(present):
        node = find_node(cluster, name, sum(node_name == name for node_name, _ in present))
        if not 0 <= local < len(node.ranks):
            raise HexiError(f"--node {name}: has no GPU {local}; number its ranks from 0")
        starts[node.ranks[local]] = rank
    return starts
