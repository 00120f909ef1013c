"""The rules of baselines allow the layouts that are worked out by hand here."""

from dataclasses import replace

import pytest

from megatron_hexi.models import Job, presets
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.baselines.rules import replica_counts, why_none
from tests.support.baselines import candidates, fleet_of, found, groups, shapes
from tests.support.costs import TINY, TINY_PRODUCTS, products_by_hand, tiny_job


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
    assert [member.tokens for member in ring.trial.plan.members] == [1366, 1366, 1365]
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
