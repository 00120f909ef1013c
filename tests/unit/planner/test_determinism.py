"""The same input gives the same bytes, in any process; what the cluster file lists first decides nothing."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.plan import dump_plan
from megatron_hexi.planner import Request, find_plan
from tests.support.costs import tiny_job
from tests.support.fleets import device_text, random_case, random_parallel_case, read_text, reproduce

ROOT = Path(__file__).parents[3]
SEEDS = (0, 5, 8)


def digest(seed):
    """Of the plan's bytes; the refusal's words where nothing fits."""
    _, known, job = random_parallel_case(seed, gpus=(3, 6), batches=(2, 4))
    try:
        text = dump_plan(find_plan(Request(job), known).plan)
    except HexiError as error:
        text = str(error)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def digests():
    return [digest(seed) for seed in SEEDS]


def test_planning_again_gives_the_same_bytes(digests):
    """One of them; another process plans all."""
    assert digest(SEEDS[0]) == digests[0]
    assert len(set(digests)) == len(SEEDS)


@pytest.mark.parametrize(
    ("hash_seed", "threads"), [("2", "2"), pytest.param("1", "1", marks=pytest.mark.slow)]
)
def test_so_does_another_process(digests, hash_seed, threads):
    code = f"from tests.unit.planner.test_determinism import digest; print(*map(digest, {SEEDS}))"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == digests


# What the file lists first


def reordered(text, random):
    """The same cluster with its entries in another order."""
    lines = text.split("\n")
    places = [place for place, line in enumerate(lines) if line.startswith("- {name")]
    entries = [lines[place] for place in places]
    shuffled = entries
    while len(entries) > 1 and shuffled == entries:
        shuffled = random.sample(entries, len(entries))
    for place, line in zip(places, shuffled, strict=True):
        lines[place] = line
    return "\n".join(lines)


def node_of(known, gpu):
    """What there is to know of a GPU's node. The links inside a node of one GPU are of no use."""
    node = known.nodes[known.ranks[gpu].node]
    inside = (node.bandwidth, node.latency_s) if len(node.ranks) > 1 else ()
    return str((node.device.name, node.device.matmul.rates, len(node.ranks), *inside))


def described(plan, known):
    """Replicas, groups and members as sets, stages in turn; a GPU by its name, or by its node where two are
    alike."""
    gpus = plan.gpus or range(len(known.ranks))
    kinds = [node_of(known, node.ranks[0]) for node in known.nodes]
    twins = len(set(kinds)) < len(kinds)

    def name(rank):
        gpu = gpus[rank]
        return node_of(known, gpu) if twins else known.rank_name(gpu)

    def members(group):
        return sorted(
            (sorted(map(name, one.ranks)), one.tokens, one.heads[1] - one.heads[0]) for one in group.members
        )

    def domains(domain):
        return domain.samples, sorted(map(members, domain.groups))

    def stages(replica):
        return [
            (str(stage.layers), str(stage.recompute), sorted(map(domains, stage.domains)))
            for stage in replica.stages
        ]

    return sorted((replica.micro_batches, stages(replica)) for replica in plan.replicas)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 24))]
)
def test_the_order_of_entries_decides_nothing(seed):
    text, known, job = random_case(seed, gpus=(2, 3, 4, 6))
    if len(known.nodes) == 1:
        return
    clusters = known, read_text(reordered(text, Random(seed)))
    try:
        plans = [find_plan(Request(job), one) for one in clusters]
    except NothingFitsError:
        return
    case = reproduce(text, job)
    shapes = [described(one.plan, machines) for one, machines in zip(plans, clusters, strict=True)]
    assert shapes[0] == shapes[1], case
    # Rings of gradients go by rank, and so by the file. Where nodes have links of their own to each other, or
    # racks, a ring may be longer one way than another; everything else is as long.
    rings = [one.cost.phases.gradients for one in plans]
    times = [one.cost.iteration_s for one in plans]
    if known.file.matrix or known.file.levels:
        times = [total - ring for total, ring in zip(times, rings, strict=True)]
    assert times[0] == pytest.approx(times[1], rel=1e-9), case
    assert plans[0].bound.iteration_s == pytest.approx(plans[1].bound.iteration_s, rel=2e-3), case


def test_nor_does_it_where_nodes_of_one_gpu_differ_in_their_links():
    entries = ["- {name: a, gpu: G, gpus: 2, intra: {bandwidth_gb_s: 0.5}}", "- {name: b, gpu: G, gpus: 2}"]
    rest = (
        f"network: {{bandwidth_gb_s: 0.01, latency_us: 0, per: node}}\ndevices:\n{device_text('G', 100, 100)}"
    )
    times = []
    for order in (entries, entries[::-1]):
        known = read_text("\n".join(["name: links", "nodes:", *order, rest]))
        times.append(find_plan(Request(tiny_job(seq_length=2**16)), known).cost.iteration_s)
    assert times[0] == pytest.approx(times[1], rel=1e-9)
