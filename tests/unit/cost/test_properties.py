"""On random plans: more bandwidth, faster GPUs or fewer tokens never cost time; and how fast we say so."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import proportional_plan
from tests.support.costs import cluster, tiny_job
from tests.support.plans import examples

SPEEDS = st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=3), min_size=1, max_size=3)
JOBS = st.fixed_dictionaries(
    {
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "overlap_gradients": st.booleans(),
        "distributed_optimizer": st.booleans(),
        "global_batch_size": st.integers(1, 3),
    }
)


def priced(speeds, changes, bandwidth=10.0, devices="PLAIN", seq_length=4096, window=1):
    job = tiny_job(seq_length=seq_length, **changes)
    nodes = [(f"n{number}", devices, len(group)) for number, group in enumerate(speeds)]
    plan = proportional_plan(job.workload(), [speeds], window)
    return estimate(plan, job, cluster(nodes, bandwidth=bandwidth))


@given(SPEEDS, JOBS, st.floats(1, 100), st.floats(1, 10), st.integers(1, 3))
@examples(40)
def test_more_bandwidth_is_never_slower(speeds, changes, bandwidth, factor, window):
    slow = priced(speeds, changes, bandwidth, window=window)
    fast = priced(speeds, changes, bandwidth * factor, window=window)
    assert fast.iteration_s <= slow.iteration_s * (1 + 1e-9)


@given(SPEEDS, JOBS, st.floats(1, 100))
@examples(40)
def test_faster_gpus_are_never_slower(speeds, changes, bandwidth):
    slow = priced(speeds, changes, bandwidth)
    assert priced(speeds, changes, bandwidth, "DOUBLE").iteration_s <= slow.iteration_s * (1 + 1e-9)


@given(SPEEDS, JOBS, st.integers(1, 20))
@examples(40)
def test_more_tokens_are_never_faster(speeds, changes, thousands):
    few = priced(speeds, changes, seq_length=1000 * thousands)
    many = priced(speeds, changes, seq_length=1000 * thousands + 800)
    assert few.iteration_s <= many.iteration_s * (1 + 1e-9)


@given(SPEEDS, JOBS)
@examples(40)
def test_nothing_passes_the_ceiling_and_every_rank_s_time_adds_up(speeds, changes):
    cost = priced(speeds, changes)
    assert cost.tokens_per_s <= cost.ceiling_tokens_per_s
    assert 0 <= cost.idle_share < 1
    for rank in cost.ranks:
        assert rank.compute_s + rank.communication_s <= cost.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("alike", [True, False])
def test_a_thousand_ranks(alike):
    # Groups that are all cut differently are the harder case.
    random = Random(0)
    groups = [[1.0 if alike else random.uniform(0.5, 4) for _ in range(8)] for _ in range(128)]
    job = Job(presets()["gpt-13b"], 2**20, recompute="full")
    known = cluster([(f"n{number}", "PLAIN", 8) for number in range(128)])
    plan = proportional_plan(job.workload(), [groups])
    cost = CostModel(job, known).estimate(plan)
    assert len(cost.ranks) == 1024
