"""Clusters and plans of published rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.published.days import of_its_day
from benchmarks.published.profiles import profiled_device
from benchmarks.published.tables import Row, is_profiled, model, profile, site
from megatron_hexi.cluster import Cluster, Device, device
from megatron_hexi.cluster.model import ClusterFile, Matrix, Network, NodeEntry
from megatron_hexi.cluster.topology import build_cluster
from megatron_hexi.models import Job
from megatron_hexi.plan import (
    Domain,
    Exchange,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    proportional_plan,
    validate_plan,
)
from megatron_hexi.planner.baselines.flags import FlagLayout
from megatron_hexi.planner.baselines.rules import consecutive
from megatron_hexi.planner.fleet.units import stages_in_turn

K = 1024
#: GPUs of Sailor's plans by their letters.
_LETTERS = {"R": "RTX-3090", "T": "Titan-RTX", "G": "RTX-2080"}
#: Sailor's profiles are of this model.
_PROFILED = "opt-350m"


def job(row: Row) -> Job:
    """The job, as far as it is a job of Megatron's."""
    own = is_profiled(row)  # DeepSpeed's, which hides nothing, and cuts what it sends over a unit
    # Ranks that hold experts together take a sample each of one micro-batch of the plan.
    merged = max(1, row.expert // (row.tensor * row.parallel))
    return Job(
        model=model(row.model),
        seq_length=int(row.context * K),
        micro_batch_size=row.micro * merged,
        global_batch_size=row.batch,
        tensor_parallel=row.tensor,
        pipeline_parallel=1 if row.layers or row.expert else row.pipeline,
        virtual_stages=1 if row.layers or row.expert else row.chunks,
        data_parallel=len(_kinds(row)[0]) if own else row.data // merged,
        recompute="none" if row.layers or row.expert else row.recompute,
        precision="fp32" if own else row.precision,
        fp8_recipe=row.recipe,
        distributed_optimizer=row.sharded_state,
        overlap_gradients=row.overlap_gradients and not own,
        sequence_parallel=row.sequence_parallel,
        kernel=row.kernel,
        expert_imbalance=row.imbalance,
        unfused=row.unfused,
        gradient_bytes=row.gradient_bytes,
    )


def training_plan(row: Row, job: Job) -> Plan:
    """The plan of a row of training on GPUs of one kind."""
    if row.expert:
        flags = replace(
            job, pipeline_parallel=row.pipeline, micro_batch_size=row.micro, recompute=row.recompute
        )
        units = [tuple(range(first, first + row.tensor)) for first in range(0, row.ranks, row.tensor)]
        fleet = stages_in_turn(flags, equal_cluster(row), units)
        layout = FlagLayout(fleet, consecutive(fleet, row.data, 1), expert=row.expert)
        plan = layout.plan(flags, window=1)[0]
        return _by_node(plan, site(row.cluster).gpus) if row.by_node else plan
    return mixed_plan(row, job) if row.layers else equal_plan(row, job)


def _by_node(plan: Plan, gpus: int) -> Plan:
    """Return the plan with tokens that travel once to each node of so many GPUs."""

    def named(stage: Stage) -> Stage:
        nodes: dict[int, list[int]] = {}
        for rank in sorted(rank for member in stage.members for rank in member.ranks):
            nodes.setdefault(rank // gpus, []).append(rank)
        return replace(stage, expert_nodes=tuple(map(tuple, nodes.values())))

    return replace(
        plan,
        replicas=tuple(
            replace(replica, stages=tuple(map(named, replica.stages))) for replica in plan.replicas
        ),
    )


def equal_cluster(row: Row) -> Cluster:
    """As many nodes of one kind as the row needs."""
    own = site(row.cluster)
    nodes = [NodeEntry("node", own.gpu, min(own.gpus, row.ranks), max(1, row.ranks // own.gpus))]
    known = device(own.gpu)
    if row.layer_share is not None:
        known = replace(known, layer_share=row.layer_share)
    return _cluster(row, nodes, {own.gpu: of_its_day(known, row)})


def equal_plan(row: Row, job: Job) -> Plan:
    """Every replica with groups of one, a ring: Megatron's context parallelism, `p2p`.

    Attention alone also knows one group of all ranks, and groups of a node's ranks with a ring between. None
    of these systems cuts what travels into parts.
    """
    count = row.gpus or row.parallel
    degree = {"Ulysses": count, "USP": 8, "LoongTrain": 8}.get(row.method, 1)
    replica = [[1.0] * degree] * (count // degree)
    plan = proportional_plan(job.workload(), [replica] * row.data)
    return replace(plan, exchange=Exchange(window=1, parts=1))


def mixed_cluster(row: Row) -> Cluster:
    """A node of `tensor` GPUs for each stage of each replica, stage by stage."""
    kinds = [kind for stage in _kinds(row) for kind in stage]
    devices = {
        name: profiled_device(name, profile(name), model(_PROFILED), row.tensor, model(row.model).head_dim)
        for name in set(kinds)
    }
    return _cluster(row, [NodeEntry(f"n{n}", kind, row.tensor) for n, kind in enumerate(kinds)], devices)


def mixed_plan(row: Row, job: Job) -> Plan:
    """Every replica with stages of their own layers, each a unit of one node."""
    replicas = len(_kinds(row)[0])
    ends = [sum(row.layers[:stage]) for stage in range(len(row.layers) + 1)]

    def stage(replica: int, number: int) -> Stage:
        first = (number * replicas + replica) * row.tensor
        ranks = tuple(range(first, first + row.tensor))
        member = Member(ranks, job.seq_length, (0, job.model.heads // row.tensor))
        domain = Domain((Group(((0, job.seq_length),), (member,)),))
        recompute = None if is_profiled(row) else row.recompute
        return Stage((domain,), layers=(ends[number], ends[number + 1]), recompute=recompute)

    stages = range(len(row.layers))
    plan = Plan(
        job.workload(),
        tuple(Replica(tuple(stage(replica, number) for number in stages)) for replica in range(replicas)),
    )
    validate_plan(plan)
    return plan


def _kinds(row: Row) -> list[list[str]]:
    """GPUs of each stage, one a replica."""
    if row.stages:
        return [[_LETTERS[letter] for letter in stage] for stage in row.stages.split("/")]
    return [[site(row.cluster).gpu] * row.data] * len(row.layers)


def _cluster(row: Row, nodes: Sequence[NodeEntry], devices: Mapping[str, Device]) -> Cluster:
    own = site(row.cluster)
    network = Network(bandwidth_gb_s=own.network_gb_s, per=own.per)
    if not own.slow:
        return build_cluster(ClusterFile(row.cluster, tuple(nodes), network), devices)
    links = [own.slow.get(node.gpu, own.network_gb_s) for node in nodes]
    matrix = Matrix(
        nodes=tuple(f"{node.name}-0" for node in nodes),
        bandwidth_gb_s=tuple(tuple(min(a, b) for b in links) for a in links),
        latency_us=tuple(tuple(network.latency_us for _ in links) for _ in links),
    )
    return build_cluster(ClusterFile(row.cluster, tuple(nodes), matrix=matrix), devices)
