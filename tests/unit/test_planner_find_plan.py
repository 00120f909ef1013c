"""Whole plans: valid, inside memory, never slower than a baseline; and advice where none fits."""

import itertools
import re
from dataclasses import replace
from random import Random

import pytest

from megatron_hexi.cluster import cluster_digest
from megatron_hexi.cost import estimate
from megatron_hexi.errors import ClusterError, NothingFitsError
from megatron_hexi.plan import read_plan, validate_plan, write_plan
from megatron_hexi.planner import find_plan, planner
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_case, random_parallel_case, reproduce

SEEDS = range(20)


def replicas(job, known, seed):
    together = job.global_batch_size // job.micro_batch_size
    units = len(known.ranks) // (job.tensor_parallel * job.pipeline_parallel)
    two = 2 if together % 2 == 0 and units >= 4 else 1
    return Random(seed).choice([1, 1, two, None if together <= 4 else 1])


@pytest.fixture(scope="module")
def plans():
    """(text, cluster, what planning gave, seed) of each random cluster that a plan fits on."""
    found = []
    for seed in SEEDS:
        text, known, job = random_parallel_case(seed, gpus=(2, 3, 3, 6))
        try:
            planned = find_plan(job, known, data_parallel=replicas(job, known, seed), with_baselines=True)
        except (ClusterError, NothingFitsError):
            continue
        found.append((text, known, planned, seed))
    assert len(found) > 0.6 * len(SEEDS)
    return found


def test_no_baseline_is_faster(plans):
    timed = 0
    for text, _, planned, seed in plans:
        for baseline in planned.baselines:
            if baseline.trial is not None:
                part = planned.cost.iteration_s / baseline.trial.iteration_s
                assert part <= 1 + 1e-9, f"{seed}: {baseline.name} {part} {reproduce(text, planned.job)}"
                assert baseline.trial.fits
                timed += 1
    assert timed > len(plans)


def test_every_plan_is_valid_and_inside_memory(plans):
    for _, known, planned, _ in plans:
        validate_plan(planned.plan)
        assert planned.cost.fits
        cost = estimate(planned.plan, planned.job, known)
        assert cost.iteration_s == planned.cost.iteration_s
        assert all(rank.memory_gib <= rank.usable_gib for rank in cost.ranks)


def test_every_field_of_the_estimate_is_filled(plans):
    for _, known, planned, seed in plans:
        plan, told = planned.plan, planned.plan.estimate
        assert told.iteration_s == planned.cost.iteration_s > 0
        assert told.tokens_per_s == pytest.approx(
            planned.job.global_batch_size * planned.job.seq_length / told.iteration_s
        )
        assert 0 < told.lower_bound_s <= told.iteration_s, seed
        assert told.gap == pytest.approx(told.iteration_s / told.lower_bound_s - 1)
        gpus = known.ranks if plan.gpus is None else plan.gpus
        assert len(told.memory_gib) == len(gpus)
        named = {baseline.name for baseline in planned.baselines if baseline.trial is not None}
        assert set(told.against or {}) == named
        made = plan.provenance
        assert made.cluster_digest == cluster_digest(known)
        assert (made.cluster, made.model) == (known.name, planned.job.model.name)
        assert made.planner.startswith("megatron-hexi ")
        assert made.solver.startswith("OR-Tools CP-SAT ")
        assert made.created is None  # the same input gives the same bytes
        assert planned.planning_s > 0
        assert planned.trials > 0


def test_a_plan_s_file_says_it_all(plans, tmp_path):
    for _, _, planned, _ in plans[:10]:
        write_plan(planned.plan, tmp_path / "plan.yaml")
        assert read_plan(tmp_path / "plan.yaml") == planned.plan


def test_the_micro_batches_are_those_of_an_iteration(plans):
    for _, _, planned, _ in plans:
        shares = [replica.micro_batches for replica in planned.plan.replicas]
        assert sum(shares) == planned.job.global_batch_size // planned.job.micro_batch_size
        assert planned.job.data_parallel == len(shares)


def test_baselines_that_are_not_asked_for_change_no_plan():
    for seed in range(5):
        _, known, job = random_parallel_case(seed, gpus=(2, 3, 4))
        try:
            one, other = (find_plan(job, known, with_baselines=asked) for asked in (True, False))
        except (ClusterError, NothingFitsError):
            continue
        assert one.plan.replicas == other.plan.replicas
        assert one.cost.iteration_s == other.cost.iteration_s


# By hand.


def test_one_gpu_does_everything():
    planned = find_plan(tiny_job(), cluster([("a", "PLAIN", 1)]))
    (group,) = planned.plan.replicas[0].domain.groups
    (member,) = group.members
    assert (member.tokens, member.heads) == (4096, (0, 4))
    assert planned.plan.gpus is None
    assert planned.notes == ()


def test_equal_gpus_get_equal_work():
    planned = find_plan(tiny_job(seq_length=2**16), cluster([("a", "PLAIN", 4)]))
    members = planned.plan.replicas[0].domain.members
    assert {member.tokens for member in members} == {2**14}
    assert {member.heads[1] - member.heads[0] for member in members} in ({1}, {2}, {4})
    assert planned.gap < 0.05


def test_a_gpu_twice_as_fast_gets_about_twice_the_work():
    planned = find_plan(
        tiny_job(seq_length=2**17), cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)], bandwidth=1e5)
    )
    slow, fast = planned.plan.replicas[0].domain.members
    work = [member.tokens * (member.heads[1] - member.heads[0]) for member in (slow, fast)]
    assert 1.7 < work[1] / work[0] < 4
    assert planned.gap < 0.03


def test_gpus_that_would_only_cost_time_are_left_out_and_said():
    planned = find_plan(
        tiny_job(), cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 1)], bandwidth=1e-3, latency=1e4)
    )
    assert planned.plan.gpus is not None
    assert set(planned.plan.gpus) <= {0, 1}
    assert any("left out" in note for note in planned.notes)


def test_gpus_that_make_no_unit_are_named():
    planned = find_plan(tiny_job(tensor_parallel=2), cluster([("a", "PLAIN", 3)]))
    assert planned.plan.gpus == (0, 1)
    assert any("a-0/2" in note for note in planned.notes)


def test_progress_is_told():
    told = []
    find_plan(
        tiny_job(global_batch_size=2),
        cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)]),
        data_parallel=None,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert len(told) > 3
    assert all(0 <= done < total for _, done, total in told)


# Where nothing fits.


def too_large():
    for seed in range(200):
        _, known, job = random_case(seed, lengths=(2**17, 2**18), gpus=(1, 2, 3))
        try:
            find_plan(job, known)
        except NothingFitsError as error:
            yield known, job, str(error)


def test_what_would_fit_does_fit():
    proposed = 0
    for known, job, text in itertools.islice(too_large(), 8):
        assert "\n" not in text
        assert re.search(r"rank \d+ \(.*needs [\d.]+ GiB and has [\d.]+", text)
        context = re.search(r"a context of (\d+)", text)
        recompute = re.search(r"recompute = (\w+)", text)
        for changes in (
            context and {"seq_length": int(context[1])},
            recompute and {"recompute": recompute[1]},
        ):
            if changes:
                assert find_plan(replace(job, **changes), known).cost.fits
                proposed += 1
    assert proposed > 5


@pytest.mark.parametrize("replicas", [1, 2, None])
def test_a_sequence_that_all_memory_is_too_small_for_is_refused_without_a_search(monkeypatch, replicas):
    known = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    monkeypatch.setattr(planner, "_search", lambda *_: pytest.fail("searched"))
    with pytest.raises(NothingFitsError, match=r"what would fit: .*a context of"):
        find_plan(tiny_job(seq_length=2**28, global_batch_size=4), known, data_parallel=replicas)
