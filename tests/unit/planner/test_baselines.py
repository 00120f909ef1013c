"""Baselines: what their rules allow, by hand; and that the best of it is found without timing all of it."""

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import RECOMPUTES, Job, presets
from megatron_hexi.cost.layer_kinds import Latent, Window
from megatron_hexi.cost.memory import stage_params
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.rings import Rings
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.plan import validate_plan
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner import CHOSEN, Request
from megatron_hexi.planner.baselines import find_baselines, find_faster, race
from megatron_hexi.planner.baselines.find import PUBLISHED
from megatron_hexi.planner.baselines.floor import Floor
from megatron_hexi.planner.baselines.rules import NAMES, UNIFORM, replica_counts, why_none
from megatron_hexi.planner.baselines.rules import candidates as candidates_of
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import build_plan
from megatron_hexi.planner.layouts.trial import Judge
from tests.support.costs import TINY, TINY_PRODUCTS, cluster, products_by_hand, tiny_job
from tests.support.fleets import random_case, random_layouts, random_parallel_case, reproduce
from tests.support.plans import examples

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"


def fleet_of(nodes, job=None, **network):
    return find_units(job or tiny_job(), cluster(nodes, **network))


def all_fixed(job, data_parallel=1):
    """A request with none of Megatron's flags left to choose; replicas are, where they are ``None``."""
    if data_parallel is None:
        return Request(job, frozenset(CHOSEN) - {"data_parallel"})
    return Request(replace(job, data_parallel=data_parallel), frozenset(CHOSEN))


def candidates(fleet, data_parallel, names=NAMES):
    """All layouts of so many replicas; ``None``: of any number."""
    return candidates_of(fleet, replica_counts(fleet, data_parallel), names)


def floor_of(fleet):
    """A fleet's lower bounds."""
    return Floor(fleet, Rings(LinkTable(fleet.cluster)))


def by_name(request, known, **others):
    """Those that follow rules; tests of published planners stand apart."""
    return {one.name: one for one in find_baselines(request, known, **others)[0] if one.name in NAMES}


def found(fleet, data_parallel=1, **others):
    return by_name(all_fixed(fleet.job, data_parallel), fleet.cluster, **others)


def shapes(fleet, name, data_parallel=1):
    """(replicas, groups of each, size of each) that a baseline may use."""
    return {
        (len(one.layouts), len(one.layouts[0].parts), len(one.layouts[0].parts[0].units))
        for one in candidates(fleet, data_parallel)
        if name in one.texts
    }


def groups(fleet, name):
    """The groups' units of each layout that a baseline may use on one replica."""
    return {
        tuple(part.units for part in one.layouts[0].parts)
        for one in candidates(fleet, 1)
        if name in one.texts
    }


class CountingJudge(Judge):
    """Remembers what it timed."""

    timed: ClassVar[Counter] = Counter()

    def try_out(self, fleet, layouts, window):
        trial = super().try_out(fleet, layouts, window)
        self.timed[trial.plan] += 1
        return trial


def everything_timed(fleet, data_parallel):
    """The best of each baseline without any short cut: (excess, seconds)."""
    judge = Judge(fleet)
    best: dict = {}
    entrants = [(one, name) for one in candidates(fleet, data_parallel) for name in one.texts]
    entrants = [(one, name) for one, name in entrants if name != "homogeneous"]
    for units in fleet.models.values():
        part = fleet.subset(units)
        entrants += [(one, "homogeneous") for one in candidates(part, data_parallel, ("homogeneous",))]
    for (one, name), window in itertools.product(entrants, (1, 2, 4)):
        order = judge.try_out(one.fleet, one.layouts, window).order
        best[name] = min(order, best.get(name, order))
    return best


# What the rules allow


def test_a_ring_over_a_fast_and_a_slow_gpu_is_paced_by_the_slow_one():
    mixed = fleet_of([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], bandwidth=1e5)
    slow = fleet_of([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=1e5)
    fast = fleet_of([("a", "DOUBLE", 1), ("b", "DOUBLE", 1)], bandwidth=1e5)
    ring = found(mixed)["ring"]
    assert ring.layout.startswith("TP 1, PP 1: 2 groups of one")
    assert ring.uniform
    # Half the tokens each; two layers of the token work of PLAIN, forward and backward, with rotary
    # embeddings both ways and the gradients of 12 heads of queries, keys and values put together.
    moved = (10 + 12) * 512 + (2 + 3) * 2048 + 2 * 2048 + 2 * 12 * 128
    token = 2 * (sum(products_by_hand(2048, *TINY_PRODUCTS)) + 2 * 2048 * moved / 9e11)
    assert ring.trial.timing.phases.token == pytest.approx(token)
    # Of two slow ones, one stands inside and has more to add up.
    assert 0.96 < ring.trial.iteration_s / found(slow)["ring"].trial.iteration_s < 1
    assert ring.trial.iteration_s > 1.3 * found(fast)["ring"].trial.iteration_s
    assert found(mixed)["proportion"].trial.iteration_s < 0.85 * ring.trial.iteration_s


def test_the_lower_bound_of_that_ring_by_hand():
    # 2048 tokens at 100 TFLOP/s and 900 GB/s; the slow GPU stands outside, so half its queries see the rest.
    fleet = fleet_of([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], bandwidth=1e5)
    flops = 4 * (4 * 128 * (2048**2 / 2 + 1024 * 2048))
    flops_back = 2.5 * flops
    rotary, merged = 2 * 128 * (4 + 4), 4 * 128 * 1024
    moved = 2 * 2048 * (10 * 512 + 2 * 2048 + rotary) + 18 * merged
    moved_back = 2 * 2048 * (12 * 512 + 3 * 2048 + rotary + 2 * 12 * 128) + 10 * merged
    vocabulary = TINY.vocab_params(1) // 512
    logits = sum(products_by_hand(2048, (512, vocabulary))) + 52 * 2048 * vocabulary / 9e11
    layer = (
        sum(products_by_hand(2048, *TINY_PRODUCTS))
        + (flops + flops_back) / 1e14
        + (moved + moved_back) / 9e11
    )
    slow_first = next(
        one for one in candidates(fleet, 1) if one.texts.get("ring") == "2 groups of one, slow first"
    )
    # Half of the gradients and weights crosses the link, of two layers those of one for all to see.
    params = stage_params(fleet.job, 0)
    reduced, step = (4 + 2) * params / 2 / 1e14, (4 * 4 + 46 / 2) * params / 9e11
    (seconds,) = floor_of(fleet).seconds([slow_first.layouts])
    assert seconds == pytest.approx(2 * layer + logits + reduced / 2 + step)


def test_over_a_thin_link_keys_and_their_gradients_take_longer_than_attention():
    # The outer group sees all of the inner one's tokens, half of the sequence: keys and values of 4 heads of
    # 128, 2 bytes each, at 0.01 GB/s, and in the backward pass their gradients; two layers.
    thin, fat = (
        fleet_of([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=bandwidth) for bandwidth in (0.01, 1e5)
    )
    (ring,) = (one for one in candidates(thin, 1) if one.texts.get("ring", "").startswith("2 groups of one"))
    wire = 2 * (1 + 2) * (tiny_job().seq_length / 2) * 2 * 4 * 128 * 2 / 0.01e9
    (slow,), (fast,) = (floor_of(fleet).seconds([ring.layouts]) for fleet in (thin, fat))
    params = (4 + 2) * stage_params(thin.job, 0) / 2 / 0.01e9
    assert wire <= slow <= wire + params + fast


def test_six_units_and_four_heads_have_two_factorings():
    fleet = fleet_of([("a", "PLAIN", 3), ("b", "PLAIN", 3)])
    assert shapes(fleet, "usp") == {(1, 6, 1), (1, 3, 2)}
    assert groups(fleet, "usp") == {
        ((0,), (1,), (2,), (3,), (4,), (5,)),
        ((0, 1), (2, 3), (4, 5)),
        ((0, 3), (1, 4), (2, 5)),
    }
    assert shapes(fleet, "ring") == {(1, 6, 1)}
    assert shapes(fleet, "ulysses") == set()
    assert found(fleet)["ulysses"].why_not == "4 heads cannot be cut over 6 ranks"


def test_transformer_engine_refuses_kv_heads_that_do_not_divide():
    job = tiny_job(model=replace(TINY, kv_heads=2))
    fleet = fleet_of([("a", "PLAIN", 4)], job)
    assert shapes(fleet, "te-a2a+p2p") == {(1, 4, 1), (1, 2, 2)}
    # Where heads are replicated, the same group is allowed.
    assert shapes(fleet, "usp") == {(1, 4, 1), (1, 2, 2), (1, 1, 4)}
    assert shapes(fleet, "ulysses") == {(1, 1, 4)}


def test_transformer_engine_keeps_groups_inside_a_machine_unless_there_is_but_one():
    inside = fleet_of([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
    assert groups(inside, "te-a2a+p2p") == {((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)}
    across = fleet_of([("a", "PLAIN", 3), ("b", "PLAIN", 3)], tiny_job(seq_length=12288))
    assert shapes(across, "te-a2a+p2p") == {(1, 6, 1)}


def test_transformer_engine_wants_lengths_that_divide_twice():
    fleet = fleet_of([("a", "PLAIN", 3)], tiny_job(seq_length=4098))
    assert found(fleet)["te-a2a+p2p"].trial is not None  # 6 x 683
    fleet = fleet_of([("a", "PLAIN", 3)], tiny_job(seq_length=4101))
    assert found(fleet)["te-a2a+p2p"].why_not == "4101 tokens cannot be cut into 2 x 3 equal parts"


def test_40_heads_over_152_ranks():
    job = Job(presets()["gpt-13b"], 2**17, recompute="full")
    fleet = fleet_of([(f"n{number}", "PLAIN", 8) for number in range(19)], job)
    assert {shape[2] for shape in shapes(fleet, "usp")} == {1, 2, 4, 8}
    assert not shapes(fleet, "ulysses")
    assert why_none(fleet, 1, "ulysses") == "40 heads cannot be cut over 152 ranks"
    assert why_none(fleet, None, "ulysses") == "40 heads cannot be cut over 152, 76, 38 or 19 ranks"


def test_a_length_that_does_not_divide_is_apportioned_and_said():
    fleet = fleet_of([("a", "PLAIN", 3)], tiny_job(seq_length=4097))
    ring = found(fleet)["ring"]
    assert [part.tokens for part in ring.trial.layouts[0].parts] == [(1366,), (1366,), (1365,)]
    assert ring.layout.startswith("TP 1, PP 1: 3 groups of one, 2 ranks with one token more")


def test_proportion_follows_speed_alone():
    job = tiny_job(seq_length=8192)
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], job, bandwidth=100)
    fast, slow = (kind.tokens_per_s for kind in fleet.kinds)
    assert 1.5 < fast / slow < 2
    tokens = apportion(8192, [fast, fast, slow, slow])
    for one in candidates(fleet, 1, ("proportion",)):
        (layout,) = one.layouts
        held = {
            unit: count for part in layout.parts for unit, count in zip(part.units, part.tokens, strict=True)
        }
        assert [held[unit] for unit in range(4)] == tokens
    heads = {one.layouts[0].parts[0].heads for one in candidates(fleet, 1, ("proportion",))}
    assert heads == {(4,), (2, 2), (1, 1, 1, 1)}


def test_proportion_may_deal_heads_by_speed_too():
    job = tiny_job(model=replace(TINY, heads=12, kv_heads=12))
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], job)
    heads = {
        one.texts["proportion"]: one.layouts[0].parts[0].heads
        for one in candidates(fleet, 1, ("proportion",))
    }
    assert heads["one group of 4, heads equal"] == (3, 3, 3, 3)
    assert heads["one group of 4, heads in proportion"] == (4, 4, 2, 2)


def test_homogeneous_takes_the_best_model_of_gpu_alone():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2)], bandwidth=0.01)
    alone = found(fleet)["homogeneous"]
    assert alone.layout == "2 DOUBLE alone: TP 1, PP 1: one group of 2"
    assert not alone.uniform
    assert alone.trial.plan.gpus == (2, 3)
    many = fleet_of([("a", "PLAIN", 4), ("b", "DOUBLE", 1)], bandwidth=0.01)
    assert found(many)["homogeneous"].layout.startswith("4 PLAIN alone: ")


def test_in_a_cluster_of_one_kind_homogeneous_is_the_best_uniform_one():
    both = found(fleet_of([("a", "PLAIN", 4), ("b", "PLAIN", 4)]))
    assert both["homogeneous"].trial.plan == both["usp"].trial.plan
    assert both["homogeneous"].layout == f"8 PLAIN alone: {both['usp'].layout}"


# Replicas


def test_replicas_divide_units_and_micro_batches():
    fleet = fleet_of([("a", "PLAIN", 6)], tiny_job(global_batch_size=4))
    assert replica_counts(fleet, None) == [1, 2]
    assert replica_counts(fleet, 2) == [2]
    assert shapes(fleet, "ring", None) == {(1, 6, 1), (2, 3, 1)}
    for one in candidates(fleet, 2):
        assert [layout.micro_batches for layout in one.layouts] == [2, 2]
    assert {one.why_not for one in found(fleet, 4).values()} == {
        "6 ranks cannot be cut into 4 equal replicas",
        "6 PLAIN: 6 ranks cannot be cut into 4 equal replicas",
    }
    assert found(fleet, 3)["ring"].why_not == "4 micro-batches cannot be shared equally by 3 replicas"


def test_replicas_are_consecutive_or_of_one_mix():
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], tiny_job(global_batch_size=2), bandwidth=100)
    dealt = {
        tuple(tuple(sorted(unit for part in layout.parts for unit in part.units)) for layout in one.layouts)
        for one in candidates(fleet, 2)
    }
    assert dealt == {((0, 1), (2, 3)), ((0, 2), (1, 3))}
    # A replica of slow ones alone paces everything; in proportion, replicas of one mix do not.
    assert found(fleet, 2)["proportion"].layout.startswith("TP 1, PP 1: 2 replicas of one mix, each ")


# Megatron's flags


def every_choice(request, known):
    """What baselines do with each choice of the flags that are free, by the choice."""
    choices = {
        "tensor_parallel": (1, 2, 4, 8),
        "pipeline_parallel": (1, 2, 4, 8),
        "recompute": ("none", "selective", "full"),
    }
    free = {name: values for name, values in choices.items() if name not in request.fixed}
    for values in itertools.product(*free.values()):
        flags = dict(zip(free, values, strict=True))
        with contextlib.suppress(HexiError):  # heads, layers or units that do not divide
            one = Request(replace(request.job, **flags), request.fixed | flags.keys() | {"micro_batch_size"})
            yield flags, by_name(one, known)


@pytest.mark.parametrize("fixed", [(), ("tensor_parallel",), ("pipeline_parallel", "recompute")])
@pytest.mark.parametrize("memory", [80, 2.4])
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
        chosen = one.trial.fleet.job
        assert all(getattr(chosen, name) == getattr(job, name) for name in fixed)
        assert f"TP {chosen.tensor_parallel}, PP {chosen.pipeline_parallel}" in one.layout
        assert (f", recompute {chosen.recompute}:" in one.layout) == (chosen.recompute != "none")


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


def test_each_plan_is_timed_once(monkeypatch):
    monkeypatch.setattr(race, "Judge", CountingJudge)
    monkeypatch.setattr(CountingJudge, "timed", Counter())
    # Published planners have a judge of their own.
    monkeypatch.setattr("megatron_hexi.planner.baselines.find.PUBLISHED", {})
    fleet = fleet_of([("a", "DOUBLE", 4), ("b", "PLAIN", 4)], tiny_job(global_batch_size=4), bandwidth=1)
    _, trials = find_baselines(all_fixed(fleet.job), fleet.cluster)
    timed = CountingJudge.timed
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
    of_rules = len(told) - len(PUBLISHED)
    assert told[:of_rules] == [("baselines", done, of_rules) for done in range(of_rules)]
    assert {what for what, *_ in told[of_rules:]} == {"published planners"}


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


@given(st.integers(0, 2**20), st.sampled_from(["plain", "windows", "kinds", "latent"]))
@examples(80)
def test_the_lower_bound_is_below_any_layout_s_time(seed, attention):
    text, known, job = random_parallel_case(seed)
    random = Random(seed)
    job = replace(job, model=with_attention(random, job.model, attention))
    try:
        fleet = find_units(job, known)
    except ClusterError:
        return
    several = [random_layouts(random, fleet, None) for _ in range(3)]
    trials = [Judge(fleet).try_out(fleet, layouts, 1 + seed % 4) for layouts in several]
    floor = floor_of(fleet)
    (fitting,), (seconds,) = floor.may_fit(several), floor.seconds(several)
    for trial, may_fit, least_s in zip(trials, fitting, seconds, strict=True):
        assert 0 < least_s <= trial.iteration_s * (1 + 1e-9), reproduce(text, job)
        assert may_fit or not trial.fits, reproduce(text, job)
        if len({layout.micro_batches for layout in trial.layouts}) == 1:
            assert floor.least_s(len(trial.layouts)) <= trial.iteration_s * (1 + 1e-9), reproduce(text, job)
    # Each is bounded by itself.
    assert floor.seconds(several[1:2])[0, 0] == pytest.approx(seconds[1], rel=1e-12)


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
    floor = Floor(fleet, Rings(LinkTable(known)), [1, chunks])
    layouts = random_layouts(random, fleet, 1)
    assume(sum(len(part.units) for part in layouts[0].parts) == len(fleet.units))
    fitting, seconds = floor.may_fit([layouts]), floor.seconds([layouts])
    for own, may_fit, least_s in zip(floor.fleets, fitting[:, 0], seconds[:, 0], strict=True):
        trial = Judge(own).try_out(own, layouts, 1)
        if layouts[0].micro_batches % stages:
            assert own is fleet or least_s == math.inf
            continue
        assert trial.job.virtual_stages == own.job.virtual_stages
        assert 0 < least_s <= trial.iteration_s * (1 + 1e-9)
        assert may_fit or not trial.fits
        assert floor.least_s(1) <= trial.iteration_s * (1 + 1e-9)


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
