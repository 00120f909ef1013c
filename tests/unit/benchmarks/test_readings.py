"""HexiScale's and Zorse's planners, as we read them: valid plans, and cuts where links are thin."""

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from benchmarks.rivals.readings import PUBLISHED, read_baselines
from benchmarks.rivals.readings.gpu_links import bandwidths
from benchmarks.rivals.readings.hexiscale import partition
from benchmarks.rivals.readings.staged import StagedJudge
from benchmarks.rivals.readings.zorse import k_cuts
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import read_plan, validate_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.fleets import random_parallel_case, reproduce

DEEP = replace(TINY, layers=4)
SITES = "levels: [{name: site, groups: [[a, c], [b, d]], bandwidth_gb_s: 0.5, latency_us: 100}]\n"
#: Two sites, and in file order their machines alternate.
TWO_SITES = [("a", "DOUBLE", 2), ("b", "DOUBLE", 2), ("c", "PLAIN", 2), ("d", "PLAIN", 2)]


def best(name, known):
    """Its plan, which there is."""
    found = PUBLISHED[name](known)
    assert found is not None
    return found


def judge(nodes, fixed=(), extra="", **changes):
    job = tiny_job(**{"model": DEEP, "global_batch_size": 8, **changes})
    return StagedJudge(Request(job, frozenset(fixed)), cluster(nodes, extra=extra))


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_on_random_clusters_are_valid_and_as_fast_as_the_cost_model_says(name, seeds, tmp_path):
    checked = 0
    for seed in seeds:
        text, known, job = random_parallel_case(seed, gpus=(2, 4, 6, 8))
        request = Request(job)
        found = PUBLISHED[name](StagedJudge(request, known))
        if found is None:
            continue
        validate_plan(found.plan)
        write_plan(found.plan, tmp_path / "plan.yaml")
        assert read_plan(tmp_path / "plan.yaml") == found.plan, reproduce(text, job)
        cost = CostModel(found.job, known).estimate(found.plan)
        assert cost.iteration_s == pytest.approx(found.iteration_s)
        assert cost.fits == found.fits
        taken = sum(replica.micro_batches or 0 for replica in found.plan.replicas)
        assert taken * found.job.micro_batch_size == request.job.global_batch_size
        again = best(name, StagedJudge(request, known))
        assert (again.plan, again.iteration_s) == (found.plan, found.iteration_s)
        checked += 1
    assert checked > 0.4 * len(seeds)


def all_parts(weights, parts):
    """Every way to put vertices into parts of as equal weight as runs of them have."""
    count = len(weights)
    for code in range(parts**count):
        part = np.array([code // parts**place % parts for place in range(count)])
        if (np.bincount(part, weights, parts) == weights.sum() / parts).all():
            yield part


def cut(edges, part):
    return edges[part[:, None] != part].sum() / 2


def test_partitions_are_equal_and_near_the_least_cut():
    ratios = []
    for seed in range(30):
        random = np.random.default_rng(seed)
        edges = np.triu(random.random((8, 8)), 1)
        edges += edges.T
        weights = np.ones(8)
        part = partition(edges, weights, 2)
        assert np.bincount(part).tolist() == [4, 4]
        least = min(cut(edges, other) for other in all_parts(weights, 2))
        ratios.append(cut(edges, part) / least)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.05


def test_partitions_do_not_cut_thick_links_where_thin_ones_will_do():
    random = Random(0)
    for _ in range(20):
        side = [0, 1] * 4
        random.shuffle(side)
        place = np.array(side)
        edges = np.where(place[:, None] == place, 100.0, 1.0) * (1 - np.eye(8))
        part = partition(edges, np.ones(8), 2)
        assert len(set(zip(side, part.tolist(), strict=True))) == 2


def test_bandwidths_are_the_clusters():
    known = judge(TWO_SITES, extra=SITES)
    links = bandwidths(known.cluster)
    for one in range(8):
        for other in range(8):
            if one != other:
                both = known.cluster.bandwidth(one, other), known.cluster.bandwidth(other, one)
                assert links[one, other] == pytest.approx(min(both))


def test_k_cuts_part_sites_before_machines():
    cuts = {len(groups): groups for groups in k_cuts(judge(TWO_SITES, extra=SITES))}
    assert sorted(cuts) == [1, 2, 3, 4]
    assert sorted(sorted(group) for group in cuts[2]) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_stages_of_hexiscale_are_inside_machines():
    known = judge(TWO_SITES, extra=SITES)
    plan = best("hexiscale", known).plan
    gpus = plan.gpus or range(8)
    for member in plan.members:
        assert len({known.cluster.ranks[gpus[rank]].node for rank in member.ranks}) == 1


def test_fast_gpus_of_a_stage_take_more_samples():
    nodes = [("a", "DOUBLE", 1), ("b", "PLAIN", 1)]
    plan = best("zorse", judge(nodes, ["pipeline_parallel"], global_batch_size=6)).plan
    (stage,) = plan.replicas[0].stages
    fast, slow = (domain.samples for domain in stage.domains)
    assert fast == pytest.approx(2 * slow, abs=1)


@pytest.mark.parametrize(
    ("fixed", "changes"),
    [("tensor_parallel", {"tensor_parallel": 2}), ("data_parallel", {"data_parallel": 2})],
)
def test_zorse_has_no_layout_with_what_it_does_not_do(fixed, changes):
    assert PUBLISHED["zorse"](judge(TWO_SITES, [fixed], **changes)) is None


def test_what_is_fixed_stays():
    fixed = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, "recompute": "full"}
    found = best("hexiscale", judge(TWO_SITES, fixed, **fixed))
    assert len(found.plan.replicas) == 2
    for replica in found.plan.replicas:
        assert [stage.recompute for stage in replica.stages] == ["full", "full"]
        assert {len(member.ranks) for stage in replica.stages for member in stage.members} == {2}


@pytest.mark.slow
def test_the_plan_is_not_slower_than_either():
    known = judge(TWO_SITES, extra=SITES)
    planned = find_plan(known.request, known.cluster)
    for baseline in read_baselines(known.request, known.cluster):
        assert baseline.trial is not None
        assert planned.cost.iteration_s <= baseline.trial.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_order_of_a_file_s_entries_does_not_matter(name):
    nodes = [("a", "DOUBLE", 2), ("b", "PLAIN", 4), ("c", "PLAIN", 2)]
    seconds = [best(name, judge(order)).iteration_s for order in itertools.permutations(nodes)]
    assert max(seconds) == pytest.approx(min(seconds), rel=1e-9)
