"""The lower bound: no plan beats it, whatever it does; and what it comes to by hand."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import Job, presets, read_model
from megatron_hexi.cost.memory import stage_params
from megatron_hexi.errors import ClusterError, NothingFitsError
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.bound import bound
from megatron_hexi.planner.bound.pieces import demand
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge
from tests.support.bounds import lower_bound
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.fleets import (
    device_text,
    layouts_of,
    random_change,
    random_layouts,
    random_parallel_case,
    read_text,
    reproduce,
)

#: The bound is never more than what is known to be possible: it is asked for as if this much more were known.
LOOSER = 1.03
#: Clusters on which the bound was too high: little memory on some GPUs; attention slower on long sequences.
HARD = (60, 224, 382, 443, 468, 513, 529)
FAST = 1e6  # GB/s: a network that takes no time


def fleet_of(nodes, job=None, **network):
    return find_units(job or tiny_job(), cluster(nodes, **network))


def climb(random, judge, trial, steps):
    """The best that random changes come by."""
    for _ in range(steps):
        window = random.choice([trial.window, 1, 2, 3])
        other = judge.try_out(trial.fleet, random_change(random, trial.layouts), window)
        trial = min(trial, other, key=lambda trial: trial.order)
    return trial


def bound_of(trial, data_parallel):
    return lower_bound(trial.fleet, data_parallel, LOOSER * trial.iteration_s).iteration_s


def check(trial, data_parallel, seed, text):
    """The layout takes at least as long as the bound, if it fits in memory; whether it does."""
    if trial.fits:
        part = bound_of(trial, data_parallel) / trial.iteration_s
        detail = [[(part.units, part.tokens, part.heads) for part in one.parts] for one in trial.layouts]
        assert part <= 1 + 1e-9, f"{seed}: {part:.5f} {detail} {reproduce(text, trial.fleet.job)}"
    return trial.fits


@pytest.mark.parametrize("seq_length", [2**12, 2**15, 2**18])
def test_where_it_is_looked_for_first_decides_nothing(monkeypatch, seq_length):
    job = tiny_job(seq_length=seq_length)
    fleet = fleet_of([("a", "DOUBLE", 4), ("b", "PLAIN", 4), ("c", "PLAIN", 3)], job)
    monkeypatch.setattr(bound, "packable", lambda _classes, _most: False)
    least_s = seq_length / fleet.ceiling_tokens_per_s
    found = []
    for later in ((1.0,), (0.2, 1.0), (0.01, 0.5, 1.0)):
        monkeypatch.setattr(demand, "_LATER", later)
        found.append([lower_bound(fleet, 1, factor * least_s).iteration_s for factor in (1.1, 5)])
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=3e-4)


def replicas(random, fleet):
    """Data parallelism that the fleet can do."""
    together = fleet.job.global_batch_size // fleet.job.micro_batch_size
    two = len(fleet.units) > 1 and together % 2 == 0
    return random.choice([1, 1, None if together <= 4 else 1, 2 if two else 1])


def check_random(seed, layouts, steps, **changes):
    """How many layouts of one cluster were held against the bound."""
    text, known, job = random_parallel_case(seed, **changes)
    random = Random(seed)
    try:
        fleet = find_units(job, known)
    except ClusterError:  # too few GPUs for a unit
        return 0
    judge, data_parallel = Judge(fleet), replicas(random, fleet)
    trials = [
        judge.try_out(fleet, random_layouts(random, fleet, data_parallel), random.randint(1, 3))
        for _ in range(layouts)
    ]
    best = climb(random, judge, min(trials, key=lambda trial: trial.order), steps)
    # Whatever fits takes as long as the best or longer: the bound of the best is one for all of them.
    return judge.trials if check(best, data_parallel, seed, text) else 0


def test_no_layout_whatever_beats_it():
    # Groups of any units, uneven, some without tokens or heads, replicas of any size, recomputation, TP, PP.
    assert sum(check_random(seed, 4, 25) for seed in range(30)) > 600


@pytest.mark.slow  # a minute and more; of the thorough proof
def test_no_layout_of_up_to_16_gpus_beats_it():
    assert sum(check_random(seed, 4, 25, gpus=(12, 16), batches=(2, 4)) for seed in range(200, 206)) > 100


@pytest.mark.slow  # five minutes alone on a core
@pytest.mark.timeout(1200)
def test_hundreds_of_clusters_and_a_longer_climb():
    total = sum(check_random(seed, 10, 300, gpus=(2, 3, 4, 5, 6, 8, 12)) for seed in range(1000, 1500))
    assert total > 50_000


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in HARD)])
def test_no_change_of_the_planner_s_own_plan_beats_it(seed):
    text, known, job = random_parallel_case(seed, gpus=(2, 3, 4, 5, 6, 8))
    random = Random(seed)
    try:
        fleet = find_units(job, known)
        data_parallel = 1 if seed in HARD else replicas(random, fleet)
        planned = find_plan(job, known, data_parallel=data_parallel, thorough=True)
    except (ClusterError, NothingFitsError):
        return
    judge = Judge(fleet)
    trial = judge.try_out(fleet, layouts_of(fleet, planned.plan), planned.plan.exchange.window)
    best = climb(random, judge, trial, 30)
    assert check(best, data_parallel, seed, text)
    assert planned.bound.iteration_s <= best.iteration_s * (1 + 1e-9)


# Where it is easily wrong.


def test_a_plan_that_fills_the_bound_to_the_last_token_is_within_it():
    # One group that holds the whole sequence: what units can do and what there is to do differ by rounding.
    assert check_random(3008, 6, 80, gpus=(2, 3, 4, 5, 6, 8, 12))


def climbed_from_plan(job, known, steps=40):
    """The planner's plan, and what it becomes by random changes."""
    fleet = find_units(job, known)
    plan = find_plan(job, known, thorough=True).plan
    judge = Judge(fleet)
    return climb(Random(0), judge, judge.try_out(fleet, layouts_of(fleet, plan), plan.exchange.window), steps)


@pytest.mark.parametrize("slow_first", [True, False])
def test_nodes_of_one_gpu_may_differ_in_their_links(slow_first):
    nodes = ["- {name: a, gpu: G, gpus: 2, intra: {bandwidth_gb_s: 0.5}}\n", "- {name: b, gpu: G, gpus: 2}\n"]
    network = "network: {bandwidth_gb_s: 0.01, latency_us: 0, per: node}\n"
    listed = "".join(nodes if slow_first else nodes[::-1])
    text = f"name: links\nnodes:\n{listed}{network}devices:\n{device_text('G', 100, 100)}"
    known, job = read_text(text), tiny_job(seq_length=2**16)
    alone = read_text(text.replace(nodes[0], ""))
    fleet, best = find_units(job, known), find_plan(job, alone, thorough=True)
    bound = lower_bound(fleet, 1, LOOSER * best.cost.iteration_s)
    assert bound.iteration_s <= best.cost.iteration_s * (1 + 1e-9), reproduce(text, job)


@pytest.mark.parametrize("bandwidth", [300, 1000])
def test_units_may_be_worth_more_together_than_one_by_one(bandwidth):
    # A does token work, B attention: twelve times as fast together as the sum of both alone. So two units are
    # enough, and gradients go round among two.
    nodes = "".join(f"- {{name: {name.lower()}, gpu: {name}, gpus: 1}}\n" for name in "ABC")
    rates = {"A": (400, 20), "B": (20, 400), "C": (2, 2)}
    devices = "".join(device_text(name, *rate, memory=640) for name, rate in rates.items())
    network = f"network: {{bandwidth_gb_s: {bandwidth}, latency_us: 0, per: gpu}}\n"
    text = f"name: units\nnodes:\n{nodes}{network}devices:\n{devices}"
    model = replace(
        TINY, heads=32, kv_heads=1, head_dim=64, hidden_size=2048, ffn_hidden_size=8192, layers=4,
        learned_positions=6_000_000,
    )  # fmt: skip
    job = tiny_job(model=model, seq_length=2**15, overlap_gradients=False, distributed_optimizer=False)
    assert check(climbed_from_plan(job, read_text(text)), 1, "units", text)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_may_be_slower_on_longer_sequences(kv_heads):
    # cuDNN's full forward and backward curves of the H200 fall beyond 16k tokens: small rectangles run faster
    # than all of them at once would.
    model = replace(
        presets()["gpt-7b"], heads=8 if kv_heads == 1 else 6, kv_heads=kv_heads, layers=2, hidden_size=1024,
        ffn_hidden_size=4096,
    )  # fmt: skip
    text = "name: falling\nnodes:\n- {name: a, gpu: H200-SXM-141GB, gpus: 8, intra: {bandwidth_gb_s: 300}}\n"
    job = Job(model, 2**18, recompute="full", global_batch_size=1)
    assert check(climbed_from_plan(job, read_text(text), 0), 1, "falling", text)


@pytest.mark.parametrize("memory", [3, 4])
def test_who_has_no_room_for_tokens_may_still_attend(memory):
    # Two GPUs that are alike but for their memory: one holds nearly all tokens, both attend to half of them.
    text = (
        "name: room\nnodes:\n- {name: a, gpu: A, gpus: 1}\n- {name: b, gpu: B, gpus: 1}\n"
        "network: {bandwidth_gb_s: 50, latency_us: 0, per: gpu}\n"
        f"devices:\n{device_text('A', 100, 100)}{device_text('B', 100, 100, memory=memory)}"
    )
    fleet = find_units(tiny_job(seq_length=2**17), read_text(text))
    few = 4096 if memory == 3 else 8192
    layout = Layout((Part((0, 1), (2**17 - few, few), (2, 2)),), 1)
    assert check(Judge(fleet).try_out(fleet, [layout], 1), 1, "room", text)


def test_gradients_are_known_to_wait_for_keys_on_the_wire():
    # A node of each kind, a group on each: keys take a part of the wire that gradients would hide behind.
    # Without it the bound would be 6.4 % below the plan.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 4)]
    job = Job(presets()["gpt-3b"], 2**15, recompute="full")
    assert find_plan(job, cluster(nodes, bandwidth=25)).gap < 0.05


# By hand.


def test_of_one_gpu_it_is_its_work_at_the_best_rates():
    job, known = tiny_job(global_batch_size=3), cluster([("a", "PLAIN", 1)])
    planned = find_plan(job, known)
    assert planned.cost.phases.optimizer > 0.01 * planned.cost.iteration_s
    assert planned.bound.iteration_s == pytest.approx(planned.cost.iteration_s)
    assert planned.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_equal_gpus_that_talk_for_free_need_half_the_time(nodes):
    # Adding up the parts of attention takes a little besides.
    job, one = tiny_job(seq_length=2**15), device_text("G", 100, 100)
    inside = f"intra: {{bandwidth_gb_s: {FAST:.0f}, latency_us: 0}}"
    entry = f"{{name: a, gpu: G, gpus: {2 // nodes}, count: {nodes}, {inside}}}"
    network = f"network: {{bandwidth_gb_s: {FAST:.0f}, latency_us: 0}}\n"
    fleet = find_units(job, read_text(f"name: two\nnodes: [{entry}]\n{network}devices:\n{one}"))
    alone = find_plan(
        job, read_text(f"name: one\nnodes: [{{name: a, gpu: G, gpus: 1}}]\ndevices:\n{one}")
    ).cost
    half = (alone.iteration_s - alone.phases.optimizer) / 2
    bound = lower_bound(fleet, 1, 2 * half)
    assert half * (1 - 1e-3) <= bound.iteration_s <= half * 1.02


@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_go_round_between_all_that_are_needed(sharded):
    # Two nodes of one GPU, 1 GB/s; alone each would take longer than what is known. Half of gradients (4
    # bytes) and of weights (2; without the distributed optimizer gradients again) cross, behind nothing.
    job = tiny_job(seq_length=2**16, overlap_gradients=False, distributed_optimizer=sharded)
    fleet = fleet_of([("a", "PLAIN", 1), ("b", "PLAIN", 1)], job, bandwidth=1)
    ring = 1 / 2 * stage_params(job, 0) * (4 + (2 if sharded else 4)) / 1e9
    work = job.seq_length / fleet.ceiling_tokens_per_s
    assert ring > 0.1 * work
    bound = lower_bound(fleet, 1, 1.9 * work)
    assert work + ring <= bound.iteration_s * (1 + 1e-9)
    alone = lower_bound(fleet, 1, 2.1 * work)
    assert alone.iteration_s <= 2 * work


def test_what_hides_gradients_need_not_be_waited_for():
    job = tiny_job(seq_length=2**16)
    fleet = fleet_of([("a", "PLAIN", 1), ("b", "PLAIN", 1)], job, bandwidth=1)
    work = job.seq_length / fleet.ceiling_tokens_per_s
    ring = 1 / 2 * stage_params(job, 0) * (4 + 2) / 1e9
    # The last of two layers shows at least.
    assert work + ring / 2 <= lower_bound(fleet, 1, 1.9 * work).iteration_s * (1 + 1e-9)
    assert (
        lower_bound(fleet, 1, 1.9 * work).iteration_s
        <= lower_bound(replace(fleet, job=replace(job, overlap_gradients=False)), 1, 1.9 * work).iteration_s
    )


def test_it_never_says_more_than_what_is_known_to_be_possible():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    for found_s in (1e-9, 1e-3, 1.0):
        assert lower_bound(fleet, 1, found_s).iteration_s <= found_s


@pytest.mark.parametrize("data_parallel", [1, 2, None])
def test_more_gpus_or_faster_links_never_raise_it(data_parallel):
    job = tiny_job(seq_length=2**14, global_batch_size=2)
    few = [("a", "PLAIN", 2), ("b", "DOUBLE", 2)]
    bounds = [
        lower_bound(fleet_of(nodes, job, bandwidth=bandwidth), data_parallel, 0.1).iteration_s
        for nodes, bandwidth in ((few, 1), (few, 10), ([*few, ("c", "DOUBLE", 2)], 10))
    ]
    assert bounds[0] * (1 + 2e-3) >= bounds[1]
    assert bounds[1] * (1 + 2e-3) >= bounds[2]


def test_what_heads_need_of_memory_counts_in_groups_over_several_sites():
    # Four H100 and four A100 whose memory is full: heads take room that tokens then have not.
    known = read_cluster(Path("benchmarks/simulation/clusters/testbed-8.yaml"))
    planned = find_plan(Job(read_model("gpt-7b"), 2**18, recompute="full"), known)
    assert max(rank.memory_gib / rank.usable_gib for rank in planned.cost.ranks) > 0.99
    assert planned.gap < 0.05
