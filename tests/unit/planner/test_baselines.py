"""The best layout of each baseline, which is found without timing all of them."""

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hexi.cluster import read_cluster
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.kinds import Latent, Window
from megatron_hexi.models import Documents, Job, presets
from megatron_hexi.plan import validate_plan
from megatron_hexi.plan.recompute import RECOMPUTES, spell_recompute
from megatron_hexi.planner import Request
from megatron_hexi.planner.baselines import find_baselines, find_faster
from megatron_hexi.planner.baselines.flags import FlagLayout, Floor
from megatron_hexi.planner.baselines.rules import NAMES, UNIFORM
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import build_plan
from megatron_hexi.planner.layouts.trial import Judge, noting
from tests.support.baselines import all_fixed, by_name, candidates, fleet_of, found
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.fleets import random_case, random_layouts, random_parallel_case, reproduce
from tests.support.plans import examples

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"


def everything_timed(fleet, data_parallel):
    """The best of each baseline without any short cut: (excess, seconds)."""
    judge = Judge(fleet)
    best: dict = {}
    entrants = [(one, name) for one in candidates(fleet, data_parallel) for name in one.texts]
    entrants = [(one, name) for one, name in entrants if name != "homogeneous"]
    node_of = [fleet.cluster.ranks[unit.gpus[0][0]].node for unit in fleet.units]
    size_of = [len(fleet.cluster.nodes[node].ranks) for node in node_of]
    for units in fleet.models.values():
        sizes = {size_of[unit] for unit in units}
        for part in (units, *([unit for unit in units if size_of[unit] == size] for size in sizes)):
            alone = candidates(fleet.subset(part), data_parallel, ("homogeneous",))
            entrants += [(one, "homogeneous") for one in alone]
    for (one, name), window in itertools.product(entrants, (1, 2, 4)):
        order = judge.try_out(one.fleet, one.layouts, window).order
        best[name] = min(order, best.get(name, order))
    return best


# Megatron's flags


def every_choice(request, known):
    """What baselines do with each choice of the flags that are free, by the choice."""
    choices = {
        "tensor_parallel": (1, 2, 4, 8),
        "pipeline_parallel": (1, 2, 4, 8),
        "recompute": ("none", ("mlp",), "full"),
    }
    free = {name: values for name, values in choices.items() if name not in request.fixed}
    for values in itertools.product(*free.values()):
        flags = dict(zip(free, values, strict=True))
        with contextlib.suppress(HexiError):  # heads, layers or units that do not divide
            one = Request(replace(request.job, **flags), request.fixed | flags.keys() | {"micro_batch_size"})
            yield flags, by_name(one, known)


@pytest.mark.parametrize(
    ("fixed", "memory"),
    [
        ((), 2.4),
        (("pipeline_parallel", "recompute"), 80),
        (("pipeline_parallel", "recompute"), 2.4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((), 80), (("tensor_parallel",), 80), (("tensor_parallel",), 2.4))
        ),
    ],
)
def test_flags_that_are_not_fixed_are_the_best_of_all(fixed, memory):
    known = cluster(
        [("a", f"DOUBLE, memory_gb: {memory}", 2), ("b", "PLAIN", 2), ("c", "PLAIN", 2)], bandwidth=1
    )
    model = replace(TINY, layers=4)
    job = tiny_job(model=model, seq_length=8192, global_batch_size=2, pipeline_parallel=2, recompute="full")
    request = Request(job, frozenset(fixed))
    every = list(every_choice(request, known))
    for name, one in by_name(request, known).items():
        fitting = [(found[name].trial, flags) for flags, found in every if found[name].trial is not None]
        if one.trial is None:
            assert not fitting
            continue
        best, _ = min(fitting, key=lambda pair: pair[0].iteration_s)
        assert one.trial.iteration_s == pytest.approx(best.iteration_s, rel=1e-8)
        chosen = one.trial.job
        assert all(getattr(chosen, name) == getattr(job, name) for name in fixed)
        assert f"TP {chosen.tensor_parallel}, PP {chosen.pipeline_parallel}" in one.layout
        assert (f", recompute {spell_recompute(chosen.recompute)}:" in one.layout) == (
            chosen.recompute != "none"
        )


def test_flags_that_no_unit_can_have_are_refused():
    request = Request(tiny_job(tensor_parallel=4), frozenset(["tensor_parallel"]))
    with pytest.raises(ClusterError, match=r"--tensor-model-parallel-size 4.*give smaller sizes"):
        find_baselines(request, cluster([("a", "PLAIN", 2)]))


# Finding the best


def test_where_nothing_fits_the_shortage_is_named():
    job = Job(presets()["gpt-7b"], 2**20, recompute="full")
    known = found(fleet_of([("a", "PLAIN", 2), ("b", "PLAIN", 2)], job))
    for one in known.values():
        assert one.trial is None
        assert one.why_not.startswith("short of memory: rank ")
        assert "PLAIN) needs " in one.why_not
        assert " GiB and has 64.0, most of it " in one.why_not
        assert one.layout


def test_each_plan_is_timed_once():
    fleet = fleet_of([("a", "DOUBLE", 4), ("b", "PLAIN", 4)], tiny_job(global_batch_size=4), bandwidth=1)
    timed: Counter = Counter()
    with noting(lambda candidate: timed.update([candidate.plan])):
        _, trials = find_baselines(all_fixed(fleet.job), fleet.cluster)
    assert set(timed.values()) == {1}
    assert len(timed) == trials
    assert {plan.exchange.window for plan in timed} == {1, 2, 4}
    # With two groups there is one step, and a window changes nothing.
    for plan in timed:
        if len(plan.replicas[0].domain.groups) <= 2:
            assert plan.exchange.window == 1


def test_progress_is_told():
    told, fleet = [], fleet_of([("a", "PLAIN", 4)])
    found(fleet, progress=lambda *words: told.append(words))
    assert told == [("layouts of Megatron's flags", done, len(told)) for done in range(len(told))]


NODES = st.lists(
    st.tuples(st.sampled_from(["PLAIN", "DOUBLE"]), st.integers(1, 4)), min_size=1, max_size=3
).map(lambda nodes: [(f"n{number}", *node) for number, node in enumerate(nodes)])
JOBS = st.fixed_dictionaries(
    {
        "seq_length": st.sampled_from([24, 512, 1001, 4096, 20000]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "global_batch_size": st.sampled_from([1, 2, 4]),
        "model": st.sampled_from([1, 2, 4]).map(lambda kv: replace(TINY, kv_heads=kv)),
        "overlap_gradients": st.booleans(),
    }
)
BANDWIDTHS = st.sampled_from([0.1, 1, 10, 1000])


@given(st.integers(0, 2**20), st.sampled_from([1, None]))
@examples(6)
def test_the_best_is_what_timing_everything_finds(seed, data_parallel):
    text, known, job = random_case(seed, (2, 4, 4, 6, 8))
    fleet = find_units(job, known)
    best = everything_timed(fleet, data_parallel)
    for name, one in found(fleet, data_parallel).items():
        if name not in best:
            assert one.trial is None, reproduce(text, job)
            assert one.why_not
        elif best[name][0] > 0:
            assert one.trial is None, reproduce(text, job)
            assert one.why_not.startswith("short of memory")
        else:
            assert one.trial.iteration_s == pytest.approx(best[name][1], rel=1e-8), reproduce(text, job)
            assert one.why_not == ""


@given(NODES, JOBS, BANDWIDTHS, st.floats(0.3, 1.5))
@examples(8)
def test_with_a_limit_nothing_faster_is_lost(nodes, changes, bandwidth, share):
    known = cluster(nodes, bandwidth=bandwidth)
    request = Request(tiny_job(**changes), frozenset({"tensor_parallel", "micro_batch_size"}))
    timed = [one.trial for one in find_baselines(request, known)[0] if one.trial is not None]
    best = min(trial.iteration_s for trial in timed)
    limit = share * best
    faster, _ = find_faster(request, known, limit)
    assert (faster is None) == (best >= limit)
    assert faster is None or faster.iteration_s == pytest.approx(best, rel=1e-8)


def with_attention(random, model, attention):
    """The model with other attention, in all its layers or some."""
    size = 2 ** random.randint(4, 15)
    if attention == "windows":
        return replace(model, window=Window(size))
    if attention == "kinds":
        return replace(model, window=Window(size, tuple(n % 2 == 0 for n in range(model.layers))))
    if attention == "latent":
        latent = Latent(64, 16, random.choice([48, 128, 192]), random.choice([None, 96]))
        return replace(model, kv_heads=model.heads, latent=latent)
    return model


@given(
    st.integers(0, 2**20),
    st.sampled_from(["plain", "windows", "kinds", "latent"]),
    st.sampled_from([None, None, False, True]),
)
@examples(120)
def test_the_lower_bound_is_below_any_layout_s_time(seed, attention, dealt):
    text, known, job = random_parallel_case(seed)
    random = Random(seed)
    job = replace(job, model=with_attention(random, job.model, attention))
    if dealt is not None and attention != "latent":
        lengths = sorted({random.randint(1, 2 * job.seq_length) for _ in range(3)})
        documents = Documents(tuple(lengths), (1.0,) * len(lengths), dealt)
        job = replace(job, micro_batch_size=1, documents=documents)
    try:
        fleet = find_units(job, known)
    except ClusterError:
        return
    several = [random_layouts(random, fleet, None) for _ in range(3)]
    trials = [Judge(fleet).try_out(fleet, layouts, 1 + seed % 4) for layouts in several]
    layouts = [FlagLayout(fleet, each) for each in several]
    floor = Floor(layouts)
    fullness, seconds = floor.fullness(job), floor.seconds(job)
    for trial, fullest, least_s in zip(trials, fullness, seconds, strict=True):
        assert 0 < least_s <= trial.iteration_s * (1 + 1e-9), reproduce(text, job)
        assert 0 < fullest <= trial.timing.fullness * (1 + 1e-9), reproduce(text, job)
    # Each is bounded by itself.
    assert Floor(layouts[1:2]).seconds(job)[0] == pytest.approx(seconds[1], rel=1e-12)


@given(st.integers(0, 2**20), st.sampled_from(["plain", "windows", "kinds"]))
@examples(60)
def test_the_lower_bound_is_below_any_interleaved_layout_s_time(seed, attention):
    random = Random(seed)
    stages, chunks = random.choice([2, 3, 4]), random.choice([2, 3])
    model = with_attention(random, replace(TINY, layers=stages * chunks * random.choice([1, 2])), attention)
    micro_batches = stages * random.choice([1, 2, 5])
    job = tiny_job(
        model=model,
        pipeline_parallel=stages,
        global_batch_size=micro_batches,
        recompute=random.choice(RECOMPUTES),
    )
    nodes = [(f"n{n}", random.choice(["PLAIN", "DOUBLE", "H100-SXM-80GB"]), 1) for n in range(2 * stages)]
    known = cluster(nodes, bandwidth=random.choice([0.1, 1, 10, 100]))
    fleet = find_units(job, known)
    layouts = random_layouts(random, fleet, 1)
    assume(sum(len(part.units) for part in layouts[0].parts) == len(fleet.units))
    floor = Floor([FlagLayout(fleet, layouts)])
    for own in (job, replace(job, virtual_stages=chunks)):
        (least_s,), (fullest,) = floor.seconds(own), floor.fullness(own)
        if layouts[0].micro_batches % stages:
            assert own is job or least_s == math.inf
            continue
        trial = Judge(replace(fleet, job=own)).try_out(replace(fleet, job=own), layouts, 1)
        assert trial.job.virtual_stages == own.virtual_stages
        assert 0 < least_s <= trial.iteration_s * (1 + 1e-9)
        assert 0 < fullest <= trial.timing.fullness * (1 + 1e-9)


@given(NODES, JOBS)
@examples(25)
def test_plans_are_valid_and_as_equal_as_their_rules_say(nodes, changes):
    fleet = fleet_of(nodes, tiny_job(**changes))
    for one in candidates(fleet, None):
        plan = build_plan(fleet, one.layouts, 1)
        validate_plan(plan)
        assert len({len(replica.domain.members) for replica in plan.replicas}) == 1
        assert len({replica.micro_batches for replica in plan.replicas}) == 1
        members = [member for replica in plan.replicas for member in replica.domain.members]
        assert len(members) == len(fleet.units)
        if set(UNIFORM) & set(one.texts):
            tokens = [member.tokens for member in members]
            assert max(tokens) - min(tokens) <= 1
            assert len({stop - start for start, stop in (member.heads for member in members)}) == 1
        if "te-a2a+p2p" in one.texts:
            assert len({member.tokens for member in members}) == 1


@pytest.mark.parametrize(
    ("last", "bandwidth"),
    [
        ("DOUBLE", 0.3),
        ("PLAIN", 10),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("DOUBLE", 10), ("PLAIN", 0.3))),
    ],
)
def test_the_order_of_a_file_s_entries_does_not_matter(last, bandwidth):
    nodes = [("a", "DOUBLE", 2), ("b", "PLAIN", 4), ("c", last, 2)]
    job = tiny_job(seq_length=12288, global_batch_size=2)
    seen = set()
    for order in itertools.permutations(nodes):
        known = found(fleet_of(order, job, bandwidth=bandwidth), None)
        seen.add(
            tuple(
                (name, known[name].why_not, float(f"{known[name].tokens_per_s or 0:.9g}")) for name in NAMES
            )
        )
    assert len(seen) == 1
    assert [name for name, *_ in seen.pop()] == list(NAMES)


@pytest.mark.parametrize("context", [32768, 131072])
def test_all_of_them_can_be_laid_out_on_sixteen_gpus(context):
    job = Job(presets()["gpt-7b"], context, recompute="full")
    fleet = find_units(job, read_cluster(EXAMPLES / "mixed-16.yaml"))
    known = found(fleet, None)
    assert all(one.trial is not None for one in known.values())
    assert known["usp"].trial.tokens_per_s < known["proportion"].trial.tokens_per_s
    ends = max(known[name].trial.tokens_per_s for name in ("ring", "ulysses", "te-a2a+p2p"))
    assert ends <= known["usp"].trial.tokens_per_s


def test_a_hundred_and_twenty_eight():
    job = Job(presets()["gpt-7b"], 2**17, recompute="full")
    nodes = [(f"n{number}", "DOUBLE" if number < 8 else "PLAIN", 8) for number in range(16)]
    fleet = fleet_of(nodes, job, bandwidth=25)
    assert found(fleet, None)["usp"].trial is not None
