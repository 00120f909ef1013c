"""What the cost model and the simulator say of plans on clusters, and what rates a plan's units have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.published.predict import compare
from benchmarks.published.tables import tables
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel, IterationCost
from megatron_hexi.cost.unit_rates import unit_rates
from megatron_hexi.errors import ClusterError, PlanError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Job, Model, presets
from megatron_hexi.plan import Exchange, Plan, Stage, proportional_plan, validate_plan
from megatron_hexi.plan.layout import apportion
from megatron_hexi.plan.terms import Offload
from tests.golden.plans import random_plan
from tests.golden.values import plain
from tests.support.fleets import random_cluster_text, read_text
from tests.support.stage_layouts import LAYOUTS, stage_layout

COUNT = 200
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
HOST = "host: {usable_gib: 100, bandwidth_gb_s: 20, memory_gb_s: 80}"
#: Clusters with units on two nodes that are given up before one of a single node is taken.
_TRIES = 20


@dataclass(frozen=True)
class Case:
    """A plan, and the job and cluster for which it is priced."""

    plan: Plan
    job: Job
    cluster: Cluster


def cases(count: int = COUNT) -> Iterator[tuple[str, Case]]:
    """The example clusters, the layouts of the training tests, and random plans by seed."""
    for path in sorted(CLUSTERS.glob("*.yaml")):
        cluster = read_cluster(path)
        for name, length in (("llama3-8b", 2**15), ("gpt-13b", 2**17)):
            job = Job(presets()[name], length, recompute="selective")
            groups = [[1.0 + node.device.memory_gb for _ in node.ranks] for node in cluster.nodes]
            plan = proportional_plan(job.workload(), [groups])
            yield f"{path.stem} {name}", Case(plan, job, cluster)
    with TemporaryDirectory() as folder:
        for number, name in enumerate(LAYOUTS):
            yield name, _case(stage_layout(name, Path(folder)), Random(number))
    for seed in range(count):
        random = Random(f"timing {seed}")
        plan = random_plan(seed)
        yield f"random-{seed:03}", _case(_varied(plan, random) if seed % 2 else plan, random)


def _varied(plan: Plan, random: Random) -> Plan:
    """The plan with other recomputation, exchanges, ministages, offload and deals, where these are valid."""
    replicas = []
    for one in plan.replicas:
        stages = [_stage(stage, one.micro_batches or 0, random) for stage in one.stages]
        least = min(stage.layers[1] - stage.layers[0] for stage in stages if stage.layers)
        if random.random() < 0.5:
            count = random.randint(1, least)
            places: tuple[Offload, ...] = ("parameters", "optimizer", "activations")
            stages = [
                replace(
                    stage,
                    ministages=count,
                    offload=tuple(place for place in places if random.random() < 0.5) or None,
                )
                for stage in stages
            ]
        replicas.append(replace(one, stages=tuple(stages)))
    varied = replace(plan, replicas=tuple(replicas))
    try:
        validate_plan(varied)
    except PlanError:
        return plan
    return varied


def _stage(stage: Stage, micro_batches: int, random: Random) -> Stage:
    domains = len(stage.domains)
    if 1 < domains <= micro_batches and random.random() < 0.5:
        counts = [1 + count for count in apportion(micro_batches - domains, [1] * domains)]
        pairs = zip(stage.domains, counts, strict=True)
        stage = replace(stage, domains=tuple(replace(d, samples=None, micro_batches=n) for d, n in pairs))
    return replace(
        stage,
        recompute=random.choice([None, "none", "selective", "full", 1]),
        exchange=random.choice([None, Exchange(random.randint(1, 3), random.randint(1, 4))]),
    )


def _case(plan: Plan, random: Random) -> Case:
    workload = plan.workload
    repeats = random.choice([1, 1, 2, 3]) if plan.is_repeated else 1
    model = Model(
        name="random",
        layers=workload.layers or repeats * random.randint(1, 3),
        hidden_size=random.choice([256, 1024]),
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        ffn_hidden_size=4096,
        gated=random.random() < 0.5,
        vocab_size=random.choice([1024, 8192]),
        tied_embeddings=random.random() < 0.5,
    )
    shares = [replica.micro_batches for replica in plan.replicas]
    samples = plan.job.micro_batch_size or random.randint(1, 3)
    job = Job(
        model=model,
        seq_length=workload.seq_length,
        micro_batch_size=samples,
        global_batch_size=samples * sum(3 if share is None else share for share in shares),
        tensor_parallel=workload.tensor_parallel or 1,
        pipeline_parallel=repeats,
        data_parallel=len(plan.replicas),
        recompute=random.choice(["none", "selective", "full"]),
        precision=random.choice(["bf16", "bf16", "fp16", "fp32"]),
        distributed_optimizer=random.random() < 0.8,
        overlap_gradients=random.random() < 0.8,
        sequence_parallel=random.random() < 0.5,
    )
    return Case(plan, job, _cluster(plan, job, plan.ranks * repeats, random))


def _cluster(plan: Plan, job: Job, gpus: int, random: Random) -> Cluster:
    """A random cluster of so many GPUs in which each unit is on one node."""
    for most_nodes in [4] * _TRIES + [1]:
        text = random_cluster_text(random, gpus, most_nodes)
        cluster = read_text(text.replace("{name: n", f"{{{HOST}, name: n"))
        try:
            CostModel(job, cluster).timing(plan)
        except ClusterError:
            continue
        return cluster
    raise AssertionError("one node has every unit")


def values(case: Case) -> dict[str, Any]:
    """Seconds and bytes of an iteration, the simulator's seconds, and the rates of units."""
    cost = CostModel(case.job, case.cluster).estimate(case.plan)
    found: dict[str, Any] = {**_cost(cost)}
    found["simulated"] = simulate(case.plan, case.job, case.cluster).iteration_s
    if case.plan.is_repeated and case.job.pipeline_parallel == 1:
        found["rates"] = unit_rates(case.plan, case.job, case.cluster)
    return {name: plain(value) for name, value in found.items()}


def _cost(cost: IterationCost) -> dict[str, Any]:
    """Figures of ranks are added up with the rank's number as weight: one that changes its rank shows."""
    ranks: dict[str, float] = {}
    for rank in cost.ranks:
        own = {field.name: getattr(rank, field.name) for field in fields(rank)}
        figures = {name: value for name, value in own.items() if isinstance(value, float)}
        figures |= {f"memory.{name}": value for name, value in rank.memory.terms.items()}
        figures |= {f"host.{name}": value for name, value in rank.host_memory.terms.items()}
        figures |= {"stage": float(rank.stage), "unit": float(rank.unit), "gpu": float(rank.gpu)}
        for name, value in figures.items():
            ranks[name] = ranks.get(name, 0.0) + (1 + rank.rank) * value
    return {
        "ceiling_tokens_per_s": cost.ceiling_tokens_per_s,
        "phases": {field.name: getattr(cost.phases, field.name) for field in fields(cost.phases)},
        "ranks": ranks,
        "paces": cost.paces,
        "hosts": cost.host_loads,
    }


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the model says of each row of the tables that others published."""
    for table in tables():
        rows = compare(table)
        yield f"published {table.name}", {f"{one.row}, {one.what}": plain(one.predicted) for one in rows}
