"""What a plan is made of, by hand: units, stacks, sites, their order; groupings that are tried."""

import itertools
from collections import Counter

import pytest

from megatron_hexi.errors import ClusterError
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, build_plan
from megatron_hexi.planner.search.groupings import (
    all_partitions,
    group_by_counts,
    group_counts,
    mixed_groupings,
    site_classes,
)
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_parallel_case


def fleet_of(nodes, **changes):
    extra = {key: changes.pop(key) for key in ("bandwidth", "latency", "per", "extra") if key in changes}
    return find_units(tiny_job(**changes), cluster(nodes, **extra))


def gpus(fleet):
    return [unit.gpus for unit in fleet.units]


# Units


def test_each_gpu_is_a_unit_and_fast_nodes_come_first():
    fleet = fleet_of([("slow", "PLAIN", 2), ("fast", "DOUBLE", 3)])
    assert gpus(fleet) == [((2,),), ((3,),), ((4,),), ((0,),), ((1,),)]
    assert [kind.name for kind in fleet.kinds] == ["DOUBLE", "PLAIN"]
    assert [unit.kind for unit in fleet.units] == [0, 0, 0, 1, 1]
    assert fleet.sites == ((0, 1, 2), (3, 4))


def test_large_nodes_come_before_small_ones_of_the_same_gpu():
    fleet = fleet_of([("a", "PLAIN", 1), ("b", "PLAIN", 3), ("c", "PLAIN", 2)])
    assert gpus(fleet) == [((1,),), ((2,),), ((3,),), ((4,),), ((5,),), ((0,),)]


def test_tensor_parallel_units_stay_inside_a_node_and_the_rest_is_left_out():
    fleet = fleet_of([("a", "PLAIN", 3), ("b", "PLAIN", 5)], tensor_parallel=2)
    assert gpus(fleet) == [((3, 4),), ((5, 6),), ((0, 1),)]
    assert fleet.gpus([0, 2]) == (3, 4, 0, 1)


def test_pipeline_stages_go_to_different_nodes_of_a_kind():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2), ("c", "PLAIN", 2)], pipeline_parallel=2)
    # Two PLAIN nodes make two stacks across; the only DOUBLE node is cut in half.
    assert gpus(fleet) == [((2,), (3,)), ((0,), (4,)), ((1,), (5,))]
    assert fleet.sites == ((0,), (1, 2))
    # Megatron numbers stage by stage.
    assert fleet.gpus([1, 2]) == (0, 1, 4, 5)


def test_what_fits_neither_way_makes_stacks_across_kinds():
    fleet = fleet_of([("a", "PLAIN", 3), ("b", "DOUBLE", 3)], pipeline_parallel=2)
    assert sorted(gpus(fleet)) == [((0,), (1,)), ((2,), (5,)), ((3,), (4,))]
    assert {tuple(device.name for device in kind.devices) for kind in fleet.kinds} == {
        ("DOUBLE", "DOUBLE"),
        ("PLAIN", "PLAIN"),
        ("PLAIN", "DOUBLE"),
    }
    # A stack is as fast as its slowest stage.
    speed = {tuple(device.name for device in kind.devices): kind.tokens_per_s for kind in fleet.kinds}
    assert speed["PLAIN", "DOUBLE"] == speed["PLAIN", "PLAIN"] < speed["DOUBLE", "DOUBLE"]


def test_tensor_and_pipeline_parallelism_together():
    fleet = fleet_of([("a", "PLAIN", 4), ("b", "PLAIN", 4)], tensor_parallel=2, pipeline_parallel=2)
    assert gpus(fleet) == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert fleet.gpus([0, 1]) == (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("seed", range(40))
def test_every_gpu_is_in_one_unit_at_most(seed):
    _, known, job = random_parallel_case(seed)
    try:
        fleet = find_units(job, known)
    except ClusterError:
        assert len(known.ranks) < job.tensor_parallel * job.pipeline_parallel or any(
            len(node.ranks) % job.tensor_parallel for node in known.nodes
        )
        return
    used = [gpu for unit in fleet.units for part in unit.gpus for gpu in part]
    assert len(set(used)) == len(used)
    for unit in fleet.units:
        assert [len(part) for part in unit.gpus] == [job.tensor_parallel] * job.pipeline_parallel
        for part, device in zip(unit.gpus, fleet.kinds[unit.kind].devices, strict=True):
            assert {known.ranks[gpu].device for gpu in part} == {device}
            assert len({known.ranks[gpu].node for gpu in part}) == 1
    assert [unit.kind for unit in fleet.units] == sorted(unit.kind for unit in fleet.units)
    speeds = [kind.tokens_per_s for kind in fleet.kinds]
    assert speeds == sorted(speeds, reverse=True)
    # Units of a site follow each other.
    assert [unit for site in fleet.sites for unit in site] == list(range(len(fleet.units)))
    for site in fleet.sites:
        where = {tuple(known.ranks[part[0]].node for part in fleet.units[unit].gpus) for unit in site}
        assert len(where) == 1


def test_a_cluster_without_a_single_unit_is_refused():
    with pytest.raises(ClusterError, match=r"--tensor-model-parallel-size 4.*give smaller"):
        fleet_of([("a", "PLAIN", 3), ("b", "PLAIN", 2)], tensor_parallel=4)


def test_a_subset_keeps_the_order_and_knows_its_own_sites():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    part = fleet.subset([3, 0, 1])
    assert gpus(part) == [((2,),), ((3,),), ((1,),)]
    assert part.sites == ((0, 1), (2,))
    assert part.ceiling_tokens_per_s < fleet.ceiling_tokens_per_s


RACKS = """\
levels: [{name: rack, groups: [[a, c], [b, d]], bandwidth_gb_s: 1}]
"""


def test_racks_are_kept_together_whatever_the_file_s_order():
    names = {"a": 1, "b": 2, "c": 1, "d": 1}
    orders = set()
    for order in itertools.permutations(names):
        fleet = fleet_of([(name, "PLAIN", names[name]) for name in order], extra=RACKS)
        found = [fleet.cluster.rank_name(unit.gpus[0][0]) for unit in fleet.units]
        # b is large; d shares its rack; a and c are alike.
        orders.add(tuple(name if name[0] in "bd" else "x" for name in found))
    assert orders == {("b-0/0", "b-0/1", "x", "x", "d-0/0")} or orders == {
        ("b-0/0", "b-0/1", "d-0/0", "x", "x")
    }


# Layouts as plans


def test_a_layout_as_a_plan():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    layout = Layout((A2AGroup((0, 3), (1500, 500), (3, 1)), A2AGroup((2,), (2096,), (4,))), 1)
    plan = build_plan(fleet, [layout], 3)
    # Ranks by the file: a-0/0, a-0/1, b-0/0 are units 2, 3, 0.
    assert plan.gpus == (0, 1, 2)
    assert plan.exchange.window == 3
    first, second = plan.replicas[0].domain.groups
    assert [(m.lead, m.tokens, m.heads) for m in first.members] == [(1, 500, (3, 4)), (2, 1500, (0, 3))]
    assert [(m.lead, m.tokens, m.heads) for m in second.members] == [(0, 2096, (0, 4))]
    assert first.segments == ((0, 1000), (3096, 4096))
    assert (first.name, second.name) == ("b-0 + a-0", "a-0/0")


def test_a_plan_for_all_gpus_in_file_order_names_none():
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    layout = Layout((A2AGroup((0, 1, 2, 3), (1024,) * 4, (1,) * 4),), 1)
    assert build_plan(fleet, [layout], 1).gpus is None


# Groupings

BELL = [1, 2, 5, 15, 52]
NUMBERS = [1, 2, 3, 5, 7]


def is_partition(grouping, units):
    assert all(grouping)
    return sorted(unit for group in grouping for unit in group) == list(range(units))


@pytest.mark.parametrize("units", range(1, 6))
def test_all_partitions_of_units_that_all_differ(units):
    found = list(all_partitions(fleet_of([(f"n{number}", "PLAIN", 1) for number in range(units)])))
    assert len(found) == BELL[units - 1]
    assert len({frozenset(map(frozenset, grouping)) for grouping in found}) == len(found)
    assert all(is_partition(grouping, units) for grouping in found)


@pytest.mark.parametrize("units", range(1, 6))
def test_partitions_of_units_that_are_alike_are_partitions_of_their_number(units):
    found = list(all_partitions(fleet_of([("a", "PLAIN", units)])))
    assert len(found) == NUMBERS[units - 1]
    assert len({tuple(sorted(map(len, grouping))) for grouping in found}) == len(found)


def test_partitions_of_two_sites():
    # Two units a and a, and one b: aab, aa|b, ab|a, a|a|b.
    assert len(list(all_partitions(fleet_of([("a", "PLAIN", 2), ("b", "DOUBLE", 1)])))) == 4


def reached(nodes, heads=4):
    """Sizes of the groups that the only class of sites may form."""
    fleet = fleet_of(nodes)
    ((name, sites),) = site_classes(fleet).items()
    counts = group_counts(name[1], len(sites), len(fleet.units), heads)
    found = [group_by_counts(fleet, {name: count}) for count in counts]
    assert [len(grouping) for grouping in found] == counts
    assert all(is_partition(grouping, len(fleet.units)) for grouping in found)
    return {tuple(sorted(map(len, grouping))) for grouping in found}


def test_sites_that_are_alike_are_merged_kept_or_cut():
    assert reached([("a", "PLAIN", 4), ("b", "PLAIN", 4)]) >= {(8,), (4, 4), (2,) * 4, (1,) * 8}
    assert reached([("a", "PLAIN", 3)]) >= {(3,), (1, 1, 1)}
    singles = [(f"n{number}", "PLAIN", 1) for number in range(6)]
    assert reached(singles) >= {(6,), (3, 3), (2, 2, 2), (1,) * 6}


def test_sites_are_merged_so_that_each_unit_has_a_head_or_two():
    nodes = [(f"n{number}", "PLAIN", 4) for number in range(21)]
    assert (20, 20, 20, 24) in reached(nodes, heads=20)
    assert (20, 20, 20, 24) not in reached(nodes, heads=64)


NODES = [("a", "DOUBLE", 4), ("b", "DOUBLE", 4), ("c", "PLAIN", 2)]


def test_sites_are_cut_each_or_merged_whole():
    fleet = fleet_of(NODES)
    assert {name: len(sites) for name, sites in site_classes(fleet).items()} == {(0, 4): 2, (1, 2): 1}
    cut = group_by_counts(fleet, {(0, 4): 4, (1, 2): 1})
    assert sorted(cut) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert sorted(group_by_counts(fleet, {(0, 4): 1, (1, 2): 2})) == [tuple(range(8)), (8,), (9,)]


def test_every_count_and_every_mix_has_each_unit_once():
    fleet = fleet_of(NODES)
    classes = site_classes(fleet)
    ladders = [group_counts(name[1], len(sites), len(fleet.units), 4) for name, sites in classes.items()]
    for picked in itertools.product(*ladders):
        assert is_partition(group_by_counts(fleet, dict(zip(classes, picked, strict=True))), 10)
    mixed = list(mixed_groupings(fleet, 8))
    assert all(is_partition(grouping, 10) for grouping in mixed)
    assert (tuple(range(10)),) in mixed
    # Two groups of four DOUBLE and one PLAIN each.
    assert any(Counter(map(len, grouping)) == {5: 2} for grouping in mixed)
    # A head a unit, and two heads.
    assert ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9)) in mixed
    assert ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9)) in mixed
