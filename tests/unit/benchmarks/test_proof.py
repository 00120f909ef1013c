"""The bound over the whole layout space: no plan that fits takes less by the cost model, whatever it does."""

import dataclasses
import itertools
import math
from collections import defaultdict
from random import Random

import pytest

from benchmarks.proof import joint_bound, memory_fits
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.memory import GIB
from megatron_hexi.errors import ClusterError
from megatron_hexi.models import Model, job_of_plan
from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Replica,
    Stage,
    Workload,
    validate_plan,
)
from megatron_hexi.planner import bound
from megatron_hexi.planner.request import CHOSEN, Request
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.stage_plans import job_plan, stage_plan

#: As if this much more time were known to do: a bound that is too high shows.
LOOSER = 1.3
FAST = 1e6  # GB/s: a network that takes no time
GPUS = ("PLAIN", "DOUBLE", "H100-SXM-80GB", "A100-SXM-80GB", "L40S-48GB")


def random_case(random):
    """A plan of any stages, domains, shares and recomputation; its job; and nodes that it may run on."""
    heads = random.choice([2, 4, 8])
    model = Model(
        name="random",
        layers=random.randint(1, 6),
        hidden_size=random.choice([256, 512, 1024]),
        heads=heads,
        kv_heads=random.choice([count for count in (1, 2, 4, 8) if heads % count == 0]),
        head_dim=random.choice([64, 128]),
        ffn_hidden_size=random.choice([1024, 4096]),
        gated=random.random() < 0.5,
        vocab_size=random.choice([1000, 30000]),
        tied_embeddings=random.random() < 0.5,
        biases=random.random() < 0.3,
    )
    length = random.choice([256, 1024, 4096, 16384])
    workload = Workload(length, heads, model.kv_heads, model.head_dim, layers=model.layers)
    ranks, most = random.randint(2, 8), random.choice([1, 1, 2, 3])
    size = random.choice([1, 1, 2, 4])
    plan = stage_plan(random, workload, size, ranks, most)
    modes = random.choice([("none",), ("selective",), ("full",), (None, "none", "selective", "full", 1)])
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(dataclasses.replace(s, recompute=random.choice(modes)) for s in replica.stages),
        )
        for replica in plan.replicas
    )
    first = random.randint(1, ranks - 1) if random.random() < 0.6 else ranks
    nodes = [(name, random.choice(GPUS), size) for name, size in (("a", first), ("b", ranks - first)) if size]
    if 1 not in modes and not any(stage.layers is None for one in replicas for stage in one.stages):
        has_host = all(gpu not in ("PLAIN", "DOUBLE") for _, gpu, _ in nodes)
        replicas = tuple(saving(random, replica, has_host) for replica in replicas)
    plan = dataclasses.replace(plan, replicas=replicas)
    validate_plan(plan)
    job = job_of_plan(plan, model, overlap_gradients=random.random() < 0.7)
    return plan, job, nodes


def saving(random, replica, has_host):
    """A replica in some ministages, with some of what each stage holds in host memory; or as it is."""
    least = min(stage.layers[1] - stage.layers[0] for stage in replica.stages)
    count = random.choice([None, *range(1, least + 1)])
    if (count or 1) > 1 and len(replica.stages) > 1:
        replica = dataclasses.replace(replica, order=random.choice([None, "interleaved"]))
    offloads: list[tuple[str, ...] | None] = [None]
    if has_host:
        offloads.append(("optimizer",))
        if count is not None and not replica.is_interleaved:
            offloads += [("activations",), ("optimizer", "activations")]
        if (count or 1) > 1 and not replica.is_interleaved:
            offloads += [("parameters", "optimizer"), ("parameters", "optimizer", "activations")]
    return dataclasses.replace(
        replica,
        stages=tuple(
            dataclasses.replace(stage, ministages=count, offload=random.choice(offloads))
            for stage in replica.stages
        ),
    )


def just_enough(plan, job, nodes, network):
    """The nodes with so much memory that the plan fills the fullest GPU of each."""
    roomy = cluster(nodes, network)
    timing = CostModel(job, roomy).timing(plan)
    needed = [0.0] * len(nodes)
    for section, needs in zip(timing.sections, timing.needed, strict=True):
        for gpu, need in zip(section.placement.gpus[:, 0], needs, strict=True):
            node = roomy.ranks[gpu].node
            needed[node] = max(needed[node], need / GIB)
    devices = [node.device for node in roomy.nodes]
    parts = [need / device.usable_gib for need, device in zip(needed, devices, strict=True)]
    sized = [
        (name, f"{gpu}, memory_gb: {part * device.memory_gb * (1 + 1e-9)}", size)
        for (name, gpu, size), part, device in zip(nodes, parts, devices, strict=True)
    ]
    return cluster(sized, network)


def request_of(random, plan, job):
    """A request that the plan answers, with some of its terms fixed."""
    stages = plan.stages
    terms = {"data_parallel": len(plan.replicas), "micro_batch_size": job.micro_batch_size}
    widths = {len(member.ranks) for member in plan.members}
    depths = {len(replica.stages) for replica in plan.replicas}
    modes = {job.recompute if stage.recompute is None else stage.recompute for stage in stages}
    for name, values in (("tensor_parallel", widths), ("pipeline_parallel", depths), ("recompute", modes)):
        if len(values) == 1:
            (terms[name],) = values
    fixed = {name for name in CHOSEN if name in terms and random.random() < 0.3}
    if job.model.layers % terms.get("pipeline_parallel", 1):
        fixed.discard("pipeline_parallel")
    return Request(dataclasses.replace(job, **{name: terms[name] for name in fixed}), frozenset(fixed))


def check_random(seed):
    """Whether the plan of a seed can run; then the bound is no more than it takes."""
    random = Random(seed)
    plan, job, nodes = random_case(random)
    try:
        known = just_enough(plan, job, nodes, random.choice([1, 50, FAST]))
    except ClusterError:  # a unit on two nodes
        return False
    cost = CostModel(job, known).estimate(plan)
    assert cost.fits
    for request in (Request(job), request_of(random, plan, job)):
        for of_program in (True, False):  # by the linear program, and by sums over all GPUs, as plans show it
            assert (memory_fits if of_program else bound.memory_fits)(request, known), seed
            least = joint_bound if of_program else bound.lower_bound
            found = least(request, known, LOOSER * cost.iteration_s)
            assert found.iteration_s <= cost.iteration_s * (1 + 1e-9), (seed, request.fixed, found)
    return True


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.slow)], ids=str)
def test_no_plan_of_any_stages_beats_it(seeds):
    assert sum(check_random(seed) for seed in seeds) > 0.5 * len(seeds)


# All plans of few GPUs.

DEEP = dataclasses.replace(TINY, layers=4, tied_embeddings=False)


def orders(gpus):
    """All ways to cut GPUs into replicas of stages, each stage some GPUs; a GPU may be left out."""
    if not gpus:
        yield ()
        return
    first, *rest = gpus
    yield from orders(rest)
    for count in range(len(rest) + 1):
        for others in itertools.combinations(rest, count):
            mine = [first, *others]
            left = [gpu for gpu in rest if gpu not in others]
            for replicas in orders(left):
                for stages in pipelines(mine):
                    yield (stages, *replicas)


def in_turn(used, kinds):
    """Whether GPUs of each kind are used from the first on: of plans that are alike, one is enough."""
    for kind in set(kinds):
        mine = [gpu for gpu in used if kinds[gpu] == kind]
        if mine != [gpu for gpu in range(len(kinds)) if kinds[gpu] == kind][: len(mine)]:
            return False
    return True


def pipelines(gpus):
    """All ways to cut GPUs into ordered stages."""
    if not gpus:
        yield ()
    for count in range(1, len(gpus) + 1):
        for stage in itertools.combinations(gpus, count):
            for others in pipelines([gpu for gpu in gpus if gpu not in stage]):
                yield (stage, *others)


def domains(ranks, node_of, length, heads):
    """One group whose tokens are shared evenly or 2 : 1, a group a rank, or one tensor-parallel unit."""
    count = len(ranks)
    if count == 1:
        yield one_group([(ranks, length)], heads)
        return
    if heads % count == 0 and len({node_of[rank] for rank in ranks}) == 1:
        yield one_group([(ranks, length)], heads // count)
    if count == 2:
        for part in (length // 3, length // 2, 2 * length // 3):
            yield one_group([((ranks[0],), part), ((ranks[1],), length - part)], heads)
        half, quarter = length // 2, length // 4
        groups = (((0, quarter), (length - quarter, length)), ((quarter, length - quarter),))
        yield Domain(
            tuple(
                Group(segments, (Member((rank,), half, (0, heads)),))
                for segments, rank in zip(groups, ranks, strict=True)
            )
        )


def one_group(units, heads):
    """Heads go with tokens, as whole ones."""
    length, members, done = sum(tokens for _, tokens in units), [], 0
    for number, (ranks, tokens) in enumerate(units):
        upto = heads if number == len(units) - 1 else done + round(heads * tokens / length)
        members.append(Member(tuple(ranks), tokens, (done, upto)))
        done = upto
    return Domain((Group(((0, length),), tuple(members)),))


def all_plans(job, kinds):
    """Plans of all GPUs or fewer: any replicas and stages, layers, domains, shares and recomputation."""
    model, batch = job.model, job.global_batch_size // job.micro_batch_size
    for replicas in set(orders(range(len(kinds)))):
        if not 1 <= len(replicas) <= batch:
            continue
        used = [gpu for stages in replicas for stage in stages for gpu in stage]
        if not in_turn(used, kinds):
            continue
        rank_of = {gpu: rank for rank, gpu in enumerate(sorted(used))}
        node_of = {rank_of[gpu]: kinds[gpu] for gpu in used}
        choices = [
            list(domains([rank_of[gpu] for gpu in stage], node_of, job.seq_length, model.heads))
            for stages in replicas
            for stage in stages
        ]
        cuts = [
            [
                list(itertools.pairwise((0, *ends, model.layers)))
                for ends in itertools.combinations(range(1, model.layers), len(stages) - 1)
            ]
            for stages in replicas
        ]
        deals = [
            deal
            for deal in itertools.product(range(1, batch + 1), repeat=len(replicas))
            if sum(deal) == batch
        ]
        for chosen, layers, deal in itertools.product(
            itertools.product(*choices), itertools.product(*cuts), deals
        ):
            rest = iter(chosen)
            yield (
                tuple(
                    Replica(tuple(Stage((next(rest),), layers=own) for own in cut), share)
                    for cut, share in zip(layers, deal, strict=True)
                ),
                tuple(sorted(used)),
            )


def least_seconds(job, known, kinds):
    """The least time of all plans that fit, of all and of those with a term; infinite where none does."""
    least: defaultdict[tuple[str, object], float] = defaultdict(lambda: math.inf)
    for recompute in ("none", "full"):
        own = dataclasses.replace(job, recompute=recompute)
        models = [CostModel(dataclasses.replace(own, data_parallel=count), known) for count in (1, 2, 3)]
        for replicas, gpus in all_plans(own, kinds):
            plan = job_plan(own.workload(), replicas, job.micro_batch_size)
            timing = models[len(replicas) - 1].timing(plan, gpus)
            if not timing.fits:
                continue
            terms = {("all", None), ("recompute", recompute), ("data_parallel", len(replicas))}
            if plan.workload.tensor_parallel:
                terms.add(("tensor_parallel", plan.workload.tensor_parallel))
            depths = {len(replica.stages) for replica in replicas}
            if len(depths) == 1 and job.model.layers % max(depths) == 0:
                terms.add(("pipeline_parallel", max(depths)))
            for term in terms:
                least[term] = min(least[term], timing.phases.total)
    return least


@pytest.mark.parametrize(
    ("names", "memory", "terms", "sharp"),
    [
        # Almost twice as fast as two others, which take a sequence each: little time is lost. What
        # memory bounds is no faster, and the bound has no step of the optimizer's shard.
        (("DOUBLE", "PLAIN"), 80, {"global_batch_size": 4}, 0.89),
        (("DOUBLE", "PLAIN"), 3.2, {"global_batch_size": 3}, 0.6),
        pytest.param(
            ("H100-SXM-80GB", "L40S-48GB"),
            80,
            {"global_batch_size": 4, "micro_batch_size": 2},
            0.6,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_plan_at_all_of_three_gpus_beats_it(names, memory, terms, sharp):
    kinds = (0, 1, 1)
    job = tiny_job(model=DEEP, seq_length=16384, **terms)
    nodes = [(f"n{kind}", f"{names[kind]}, memory_gb: {memory}", kinds.count(kind)) for kind in (0, 1)]
    known = cluster(nodes, FAST)
    least = least_seconds(job, known, kinds)
    fixed = frozenset(["micro_batch_size"])
    any_s = joint_bound(Request(job, fixed), known).iteration_s
    assert sharp * least["all", None] <= any_s <= least["all", None]
    assert joint_bound(Request(job), known).iteration_s <= any_s * 1.01
    for (term, value), seconds in least.items():
        if value is not None:
            request = Request(dataclasses.replace(job, **{term: value}), fixed | {term})
            # What is fixed makes it no lower, but for the part to which it is found.
            assert any_s * 0.995 <= joint_bound(request, known, LOOSER * seconds).iteration_s <= seconds


def test_where_memory_fits_nothing_no_plan_does():
    kinds, found = (0, 1, 1), {}
    job = tiny_job(model=DEEP, seq_length=16384, global_batch_size=1)
    for memory in (2.0, 2.3, 3.2):
        nodes = [(f"n{kind}", f"PLAIN, memory_gb: {memory}", kinds.count(kind)) for kind in (0, 1)]
        known = cluster(nodes, FAST)
        found[memory] = memory_fits(Request(job), known)
        fits = least_seconds(job, known, kinds)["all", None] < math.inf
        assert found[memory] or not fits
        bound = joint_bound(Request(job), known)
        assert (bound.iteration_s < math.inf) is found[memory]
    assert not found[2.0]
    assert found[3.2]
