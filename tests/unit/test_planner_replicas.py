"""Data parallelism: who makes a replica, and who takes how many micro-batches."""

import itertools
from collections import Counter

import pytest

from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.replicas import ReplicaSearch, equal_deals, free_deals
from tests.support.brute import compositions
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import device_text, layouts_of, random_parallel_case, read_text, reproduce


def fleet_of(nodes, **changes):
    extra = {key: changes.pop(key) for key in ("bandwidth", "latency", "per", "extra") if key in changes}
    return find_units(tiny_job(**changes), cluster(nodes, **extra))


def kinds(fleet, units):
    return tuple(sorted(fleet.units[unit].kind for unit in units))


def random_fleets(count):
    for seed in range(count):
        _, known, job = random_parallel_case(seed)
        try:
            yield find_units(job, known)
        except ClusterError:
            continue


# Who makes a replica


def test_equal_replicas_have_as_many_units_each_and_share_none():
    for fleet in random_fleets(30):
        for count in range(1, len(fleet.units) + 1):
            for deal in equal_deals(fleet, count):
                assert [len(units) for units in deal] == [len(fleet.units) // count] * count
                assert len({unit for units in deal for unit in units}) == count * (len(fleet.units) // count)
                assert {unit for units in deal for unit in units} <= set(range(len(fleet.units)))


def test_where_every_kind_divides_evenly_replicas_can_be_equally_fast():
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 4), ("c", "DOUBLE", 2)])
    for count in (2, 4):
        mixes = [{kinds(fleet, units) for units in deal} for deal in equal_deals(fleet, count)]
        assert any(len(mix) == 1 for mix in mixes)


def test_equal_replicas_can_be_whole_nodes():
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2), ("c", "PLAIN", 2)])
    assert any(set(deal) == set(fleet.sites) for deal in equal_deals(fleet, 3))


def test_free_replicas_share_no_unit_and_none_is_tried_twice():
    for fleet in random_fleets(30):
        for most in (1, 3, 8):
            deals = list(free_deals(fleet, most))
            assert len(set(deals)) == len(deals)
            assert (tuple(range(len(fleet.units))),) in deals
            for deal in deals:
                units = [unit for replica in deal for unit in replica]
                assert all(deal)
                assert len(set(units)) == len(units)
                assert len(deal) <= most


def test_nodes_and_kinds_can_be_replicas_of_their_own():
    fleet = fleet_of([("a", "DOUBLE", 4), ("b", "PLAIN", 2), ("c", "PLAIN", 2)])
    deals = [set(deal) for deal in free_deals(fleet, 8)]
    assert set(fleet.sites) in deals
    assert {(0, 1, 2, 3), (4, 5, 6, 7)} in deals


# Who takes how many micro-batches


def free(fleet, deal):
    """The replicas of a deal, with what they are good for."""
    together = fleet.job.global_batch_size
    trial = ReplicaSearch(Judge(fleet), fleet, together).free(deal, float("inf"))
    assert trial is not None
    return trial


def all_shares(fleet, layouts, together):
    """The time of every way to deal the micro-batches."""
    judge, found = Judge(fleet), {}
    for shares in compositions(together, len(layouts)):
        used = [
            type(layout)(layout.parts, share) for layout, share in zip(layouts, shares, strict=True) if share
        ]
        found[shares] = judge.try_out(fleet, used, 2).iteration_s
    return found


@pytest.mark.parametrize("together", [2, 3, 5, 9])
@pytest.mark.parametrize(
    "nodes", [[("a", "DOUBLE", 2), ("b", "PLAIN", 2)], [("a", "DOUBLE", 3), ("b", "PLAIN", 1)]]
)
def test_unequal_shares_end_as_early_as_any(nodes, together):
    fleet = fleet_of(nodes, seq_length=2**14, global_batch_size=together, bandwidth=1e6)
    trial = free(fleet, fleet.sites)
    shares = [layout.micro_batches for layout in trial.layouts]
    assert sum(shares) == together
    # Each site as the only replica: its layout.
    layouts = [free(fleet, (site,)).layouts[0] for site in fleet.sites]
    assert trial.iteration_s <= min(all_shares(fleet, layouts, together).values()) * 1.001


def test_a_replica_that_is_good_for_no_micro_batch_is_left_out():
    fleet = fleet_of([("a", "DOUBLE", 8), ("b", "PLAIN", 1)], seq_length=2**14, global_batch_size=3)
    trial = free(fleet, fleet.sites)
    assert [layout.micro_batches for layout in trial.layouts] == [3]
    assert [len(layout.units) for layout in trial.layouts] == [8]


def test_replicas_that_cannot_be_fast_enough_are_not_searched():
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], global_batch_size=4)
    judge = Judge(fleet)
    assert ReplicaSearch(judge, fleet, 4).free(fleet.sites, 1e-9) is None
    assert judge.trials == 0


def test_replicas_whose_links_differ_are_not_taken_for_alike():
    # All-to-alls (or keys) of the one take ten times as long: it must not take as many micro-batches.
    text = (
        "name: links\nnodes:\n- {name: a, gpu: G, gpus: 2}\n"
        "- {name: b, gpu: G, gpus: 2, intra: {bandwidth_gb_s: 1, latency_us: 0}}\n"
        f"network: {{bandwidth_gb_s: 100, latency_us: 0, per: gpu}}\ndevices:\n{device_text('G', 100, 100)}"
    )
    fleet = find_units(tiny_job(seq_length=2**14, global_batch_size=8), read_text(text))
    trial = free(fleet, fleet.sites)
    assert trial.iteration_s <= min(all_shares(fleet, trial.layouts, 8).values()) * 1.001


# Plans


def micro_batches(plan):
    return [replica.micro_batches for replica in plan.replicas]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_replicas_take_equal_shares(count):
    job = tiny_job(seq_length=2**13, global_batch_size=8, micro_batch_size=2)
    planned = find_plan(job, cluster([("a", "DOUBLE", 4), ("b", "PLAIN", 4)]), data_parallel=count)
    assert planned.job.data_parallel == len(planned.plan.replicas) == count
    assert micro_batches(planned.plan) == [4 // count] * count
    assert len({len(replica.domain.members) for replica in planned.plan.replicas}) == 1


@pytest.mark.parametrize("seed", [0, 2, 3, 8])
def test_auto_is_at_least_as_good_as_any_number_of_equal_replicas(seed):
    text, known, job = random_parallel_case(seed, gpus=(2, 3, 4, 5, 6, 8), batches=(2, 4))
    try:
        fleet = find_units(job, known)
        auto = find_plan(job, known, data_parallel=None)
    except HexiError:
        return
    together = job.global_batch_size // job.micro_batch_size
    assert sum(micro_batches(auto.plan)) == together
    for count in range(1, min(together, len(fleet.units)) + 1):
        if together % count == 0:
            try:
                equal = find_plan(job, known, data_parallel=count)
            except HexiError:
                continue
            ratio = auto.cost.iteration_s / equal.cost.iteration_s
            assert ratio <= 1 + 1e-9, f"{count} replicas are {ratio:.4f} x as fast {reproduce(text, job)}"


def test_auto_takes_replicas_of_different_kinds_where_the_network_is_thin():
    job = tiny_job(seq_length=2**14, global_batch_size=9)
    known = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], bandwidth=0.2)
    auto = find_plan(job, known, data_parallel=None)
    shares: Counter[tuple[int, ...]] = Counter()
    for layout in layouts_of(find_units(job, known), auto.plan):
        shares[tuple(sorted({unit // 2 for unit in layout.units}))] += layout.micro_batches
    assert all(len(sites) == 1 for sites in shares)
    assert shares[(0,)] > shares[(1,)]


def test_equal_replicas_are_chosen_by_more_than_their_size():
    # The equal deals that are tried are all as good as any other choice of two units a replica, or nearly.
    job = tiny_job(seq_length=2**14, global_batch_size=2)
    nodes = [("a", "DOUBLE", 2), ("b", "PLAIN", 2)]
    fleet = fleet_of(nodes, seq_length=2**14, global_batch_size=2)
    search = ReplicaSearch(Judge(fleet), fleet, 2)
    every = [
        search.equal(deal).iteration_s
        for first in itertools.combinations(range(4), 2)
        if 0 in first
        for deal in [(first, tuple(unit for unit in range(4) if unit not in first))]
    ]
    found = find_plan(job, fleet.cluster, data_parallel=2).cost.iteration_s
    assert found <= min(every) * 1.001


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (5, r"data_parallel = 5.* has units for 4 replicas"),
        (3, "data_parallel = 3 does not divide the 8 micro-batches"),
    ],
)
def test_replicas_that_cannot_be_are_refused(count, error):
    job = tiny_job(global_batch_size=8)
    with pytest.raises(HexiError, match=error):
        find_plan(job, cluster([("a", "PLAIN", 4)]), data_parallel=count)
