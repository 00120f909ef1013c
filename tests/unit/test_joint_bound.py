"""The bound over the whole layout space: no plan that fits takes less by the cost model, whatever it does."""

import dataclasses
import itertools
import math
from random import Random

import pytest

from megatron_hexi.cost import CostModel, Job, Model, job_of_plan
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.plan import Domain, Group, JobTerms, Member, Plan, Replica, Stage, Workload, validate_plan
from megatron_hexi.planner.joint_bound import joint_bound, memory_fits
from megatron_hexi.planner.request import CHOSEN, Request
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.stage_plans import stage_plan

#: As if this much more time were known to do: a bound that is too high shows.
LOOSER = 1.3
FAST = 1e6  # GB/s: a network that takes no time
GPUS = ("PLAIN", "DOUBLE", "H100-SXM-80GB", "A100-SXM-80GB", "L40S-48GB")


def random_case(random):
    """A plan of any stages, domains, shares and recomputation; its job; and a cluster with little memory."""
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
    plan = dataclasses.replace(plan, replicas=replicas)
    validate_plan(plan)
    job = job_of_plan(plan, model, overlap_gradients=random.random() < 0.7)
    memory = random.choice(["", ", memory_gb: 3", ", memory_gb: 6", ", memory_gb: 12"])
    first = random.randint(1, ranks - 1) if random.random() < 0.6 else ranks
    nodes = [("a", random.choice(GPUS) + memory, first)]
    if first < ranks:
        nodes.append(("b", random.choice(GPUS) + memory, ranks - first))
    return plan, job, cluster(nodes, random.choice([1, 50, FAST]))


def request_of(random, plan, job):
    """A request that the plan answers, with some of its terms fixed."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
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
    """Whether the plan of a seed fits; then the bound is no more than it takes."""
    random = Random(seed)
    plan, job, known = random_case(random)
    try:
        cost = CostModel(job, known).estimate(plan)
    except ClusterError:  # a unit on two nodes
        return False
    if not cost.fits:
        return False
    for request in (Request(job), request_of(random, plan, job)):
        assert memory_fits(request, known), seed
        bound = joint_bound(request, known, LOOSER * cost.iteration_s)
        assert bound.iteration_s <= cost.iteration_s * (1 + 1e-9), (seed, request.fixed, bound)
    return True


def test_no_plan_of_any_stages_beats_it():
    assert sum(check_random(seed) for seed in range(60)) > 20


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
                    Replica(tuple(Stage((next(rest),), own) for own in cut), share)
                    for cut, share in zip(layers, deal, strict=True)
                ),
                tuple(sorted(used)),
            )


def least_seconds(job, known, kinds):
    """Of all plans that fit: the least time, of each number of replicas, and whether all fitted."""
    least, count = {}, 0
    for recompute in ("none", "selective", "full"):
        for replicas, gpus in all_plans(job, kinds):
            mine = dataclasses.replace(job, recompute=recompute, data_parallel=len(replicas))
            plan = Plan(mine.workload(), replicas, job=JobTerms(micro_batch_size=job.micro_batch_size))
            widths = {len(member.ranks) for member in plan.members}
            width = widths.pop() if len(widths) == 1 else 0
            plan = dataclasses.replace(
                plan, workload=dataclasses.replace(plan.workload, tensor_parallel=width)
            )
            timing = CostModel(mine, known).timing(plan, gpus)
            count += 1
            if not timing.fits:
                continue
            depths = {len(replica.stages) for replica in replicas}
            terms = {
                "data_parallel": len(replicas),
                "recompute": recompute,
                "tensor_parallel": width or None,
                "pipeline_parallel": depths.pop() if len(depths) == 1 else None,
                "micro_batch_size": job.micro_batch_size,
            }
            for term in (("any", 0), *terms.items()):
                least[term] = min(least.get(term, math.inf), timing.phases.total)
    return least, count
