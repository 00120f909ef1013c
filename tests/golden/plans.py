"""Digests of what ranks derive from plans: schedules, messages between stages, buckets of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from megatron_hexi.mesh import Mesh, border_messages, cut_pieces, make_buckets
from megatron_hexi.plan import (
    Exchange,
    Mask,
    Plan,
    Replica,
    Schedules,
    Stage,
    Workload,
    read_plan,
    unit_ranks,
)
from tests.golden.values import digest
from tests.support.plans import RAGGED, SPARSE, TORN, deal_domain
from tests.support.stage_layouts import LAYOUTS, stage_layout
from tests.support.stage_plans import boxes_of, stage_plan

#: Half of the random plans repeat one stage, half have stages that differ.
COUNT = 500
PICTURED = Path(__file__).parents[2] / "docs" / "images" / "plan.yaml"


def cases(count: int = COUNT) -> Iterator[tuple[str, Plan]]:
    """Examples by name, and random plans by seed."""
    yield from {"torn": TORN, "ragged": RAGGED, "sparse": SPARSE, "pictured": read_plan(PICTURED)}.items()
    with TemporaryDirectory() as folder:
        yield from ((name, stage_layout(name, Path(folder))) for name in LAYOUTS)
    for seed in range(count):
        yield f"random-{seed:03}", random_plan(seed)


def random_plan(seed: int) -> Plan:
    """A random valid plan: of one repeated stage where the seed is even, else of stages that differ."""
    random = Random(seed)
    return _staged(random) if seed % 2 else _repeated(random)


def _repeated(random: Random) -> Plan:
    width = random.choice([1, 1, 2, 4])
    heads = random.randint(1, 8) * width
    shared = [one for one in range(1, heads + 1) if heads % one == 0]
    kv_heads = random.choice([one for one in shared if one % width == 0 or width % one == 0])
    causal = random.random() < 0.8
    workload = Workload(random.randint(1, 200), heads, kv_heads, 8, causal=causal, tensor_parallel=width)
    replicas, first = [], 0
    for _ in range(random.randint(1, 3)):
        count = random.randint(1, 5)
        numbers = random.sample(range(first, first + count), count)
        first += count
        domain = deal_domain(random, workload, [unit_ranks(workload, number) for number in numbers])
        replicas.append(Replica((Stage((domain,)),)))
    return Plan(workload, tuple(replicas), Exchange(random.randint(1, 3), random.randint(1, 4)))


def _staged(random: Random) -> Plan:
    heads = random.choice([1, 2, 4, 8, 12])
    kv_heads = random.choice([one for one in (1, 2, 4, 8, 12) if heads % one == 0])
    workload = Workload(random.randint(1, 120), heads, kv_heads, 4, layers=random.randint(1, 6))
    return stage_plan(random, workload, random.randint(1, 5), random.randint(2, 8))


def digests(plan: Plan) -> dict[str, str]:
    """Schedules of every unit under the whole mask and under documents; borders and buckets of stages."""
    length = plan.workload.seq_length
    masks = [Mask(causal=plan.workload.causal)]
    if plan.workload.causal:
        masks.append(Mask(documents=(length // 3, length - length // 3), window=length // 2))
    found: dict[str, list[object]] = {
        "schedules": [
            Schedules(plan.workload_of(domain), domain, unit, (stage.exchange or plan.exchange).parts)(mask)
            for replica in plan.replicas
            for stage in replica.stages
            for domain in stage.domains
            for unit in range(len(domain.members))
            for mask in masks
        ]
    }
    if plan.replicas[0].stages[0].layers is not None:
        meshes = [Mesh(plan, plan.job.micro_batch_size or 1, parallel) for parallel in (False, True)]
        found["borders"] = [
            border_messages(mesh, number, *ends)
            for mesh in meshes
            for number, replica in enumerate(plan.replicas)
            for stage in range(len(replica.stages) - 1)
            for ends in ((stage, stage + 1), (stage + 1, stage))
        ]
        states = {rank: member.state for member in plan.members for rank in member.ranks}
        pieces = cut_pieces(boxes_of(meshes[0]))
        found["buckets"] = [make_buckets(pieces, states, size) for size in (None, 20)]
    return {name: digest(one) for name, one in found.items()}
