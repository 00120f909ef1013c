"""Transfers over shared links, by hand and against the cluster's own routes."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cluster import cluster_from_yaml
from megatron_hexi.cost.collectives import (
    all_to_alls,
    pipeline_seconds,
    tensor_parallel_seconds,
)
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.rings import Rings
from megatron_hexi.plan import Group, Member, Workload
from megatron_hexi.yaml_file import YamlFile
from tests.support.costs import cluster, plan_arrays, tiny_job
from tests.support.fleets import read_text
from tests.support.plans import examples, one_replica

GB = 1e9
TWO = [("a", "PLAIN", 2), ("b", "PLAIN", 2)]
LEVELS = """\
levels:
- {name: rack, groups: [[a, b], [c]], bandwidth_gb_s: 5, latency_us: 7}
"""


def whole(*values):
    return np.array(values, dtype=np.int64)


def seconds(links, messages, width=1):
    src, dst, size = zip(*messages, strict=True)
    return list(links.message_seconds(whole(*src), whole(*dst), np.array(size, dtype=float), width=width))


def test_alone_a_message_has_its_route_to_itself():
    links = LinkTable(cluster(TWO, bandwidth=10, latency=20))
    assert seconds(links, [(0, 1, 100 * GB)]) == [1.0]
    assert seconds(links, [(0, 2, 100 * GB)]) == [pytest.approx(10 + 20e-6)]


def test_messages_share_what_both_cross():
    links = LinkTable(cluster(TWO))
    # Both leave GPU 0: inside the node 100 GB/s, between nodes 10 GB/s a GPU.
    assert seconds(links, [(0, 2, 10 * GB), (0, 3, 20 * GB), (0, 1, 50 * GB)]) == [3, 3, 0.5]
    assert seconds(links, [(0, 2, 10 * GB), (1, 3, 20 * GB)]) == [1, 2]
    shared = LinkTable(cluster(TWO, per="node"))
    assert seconds(shared, [(0, 2, 10 * GB), (1, 3, 20 * GB)]) == [3, 3]
    # There and back do not meet.
    assert seconds(shared, [(0, 2, 10 * GB), (3, 1, 20 * GB)]) == [1, 2]


def test_sets_do_not_meet():
    links = LinkTable(cluster(TWO, per="node"))
    found = links.message_seconds(
        whole(0, 1, 0), whole(2, 3, 3), np.array([1, 1, 3]) * 10 * GB, whole(0, 0, 2)
    )
    assert list(found) == [2, 2, 3]
    assert links.set_seconds(whole(0, 1), whole(2, 3), np.array([0, 10 * GB])) == 1
    assert links.set_seconds(whole(0), whole(2), np.zeros(1)) == 0


def test_several_sizes_of_the_same_ends_are_timed_each_by_itself():
    links = LinkTable(cluster(TWO, per="node", latency=20))
    ends, sizes = (whole(0, 1, 0, 2), whole(2, 3, 1, 1)), np.array([[1, 1, 3, 2], [0, 5, 1, 9]]) * GB
    apart = [links.message_seconds(*ends, row, whole(0, 0, 1, 1)) for row in sizes]
    assert (links.message_seconds(*ends, sizes, whole(0, 0, 1, 1)) == apart).all()
    nothing = np.zeros((2, 0))
    assert links.message_seconds(whole(), whole(), nothing).shape == (2, 0)


def test_tensor_parallel_counterparts_share_what_is_not_their_own():
    assert seconds(LinkTable(cluster(TWO)), [(0, 2, 10 * GB)], width=2) == [1]
    assert seconds(LinkTable(cluster(TWO, per="node")), [(0, 2, 10 * GB)], width=2) == [2]
    assert seconds(LinkTable(cluster(TWO, per="node")), [(0, 1, 100 * GB)], width=2) == [1]


MATRIX = {
    "name": "measured",
    "nodes": [
        {"name": name, "gpu": "A100-SXM-80GB", "gpus": n} for name, n in (("a", 2), ("b", 3), ("c", 1))
    ],
    "matrix": {
        "nodes": ["b", "a", "c"],
        "bandwidth_gb_s": [[0, 4.0, 1.0], [8.0, 0, 2.0], [3.0, 5.0, 0]],
        "latency_us": [[0, 1.0, 2.0], [3.0, 0, 4.0], [5.0, 6.0, 0]],
    },
}


#: Nodes with cards of their own, in two fabrics: a and c have one, b two for four GPUs.
CARDS = """\
name: cards
nodes:
- {name: a, gpu: A100-SXM-80GB, gpus: 1, network: {cards: 1, gbit_s: 80, latency_us: 3}}
- {name: b, gpu: A100-SXM-80GB, gpus: 4, network: {cards: 2, bandwidth_gb_s: 4, latency_us: 9}}
- {name: c, gpu: A100-SXM-80GB, gpus: 1, network: {gbit_s: 8, fabric: roce}}
fabrics: [{meet: [network, roce], gbit_s: 4, per: PER, latency_us: 7}]
"""


def cluster_of_three(kind):
    if kind.startswith("cards"):
        return read_text(CARDS.replace("PER", kind.partition(" ")[2]))
    if kind == "matrix":
        return cluster_from_yaml(YamlFile(Path("matrix.yaml"), MATRIX, {}))
    nodes = [("a", "PLAIN", 2), ("b", "DOUBLE", 3), ("c", "PLAIN", 1)]
    return cluster(nodes, latency=3, per=kind, extra=LEVELS)


MESSAGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 100)).filter(lambda m: m[0] != m[1]),
    min_size=1,
    max_size=20,
)


KINDS = ["gpu", "node", "matrix", "cards node", "cards gpu", "cards fabric"]


@given(st.sampled_from(KINDS), MESSAGES)
@examples(150)
def test_as_the_cluster_s_own_routes_and_capacities_say(kind, messages):
    known = cluster_of_three(kind)
    load: dict = defaultdict(float)
    for src, dst, size in messages:
        for link in known.route(src, dst).links:
            load[link] += size * GB
    expected = [
        max(load[link] / known.capacity(link) for link in known.route(src, dst).links)
        + known.route(src, dst).latency_s
        for src, dst, _ in messages
    ]
    found = seconds(LinkTable(known), [(src, dst, size * GB) for src, dst, size in messages])
    assert found == pytest.approx(expected)


def test_all_to_alls_by_hand():
    # One group of two units on two nodes: T = 3000 and 1096, 3 heads and 1 head of 128.
    workload = Workload(4096, 4, 4, 128)
    plan = one_replica(
        workload, Group(((0, 4096),), (Member((0,), 3000, (0, 3)), Member((1,), 1096, (3, 4))))
    )
    job = tiny_job()
    links = LinkTable(cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)]))
    inward, outward = all_to_alls(mixing_of(plan_arrays(plan), job), links, whole(0, 1), 1)
    element = 128 * 2 / (10 * GB)
    # In: 0 sends 3000 tokens x (1 query, 1 key, 1 value) heads, 1 sends 1096 x 9; both directions at once.
    assert list(inward.shown[0]) == pytest.approx([1096 * 9 * element] * 2)
    # Out: 0 sends its 3 heads of 1096 tokens, 1 sends its head of 3000.
    assert list(outward.shown[0]) == pytest.approx([3 * 1096 * element] * 2)
    assert list(inward.shown[1]) == pytest.approx([3 * 1096 * element] * 2)
    assert list(outward.shown[1]) == pytest.approx([3 * 1096 * 3 * element] * 2)
    assert not any(halves.hidden.any() for halves in (inward, outward))


def test_halves_of_all_to_alls_by_hand():
    # As above, in two: of unit 0 one head comes first (two would be as near to the middle); unit 1 has one.
    workload = Workload(4096, 4, 4, 128)
    groups = Group(((0, 4096),), (Member((0,), 3000, (0, 3)), Member((1,), 1096, (3, 4))))
    links = LinkTable(cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)]))
    arrays = plan_arrays(one_replica(workload, groups, parts=2))
    inward, outward = all_to_alls(mixing_of(arrays, tiny_job()), links, whole(0, 1), 1)
    element = 128 * 2 / (10 * GB)
    # The first half in: 1 sends a query and all 6 keys and values; 0 sends 3 of 3000 tokens.
    assert list(inward.shown[0]) == pytest.approx([3000 * 3 * element] * 2)
    assert list(inward.hidden[0]) == pytest.approx([1096 * 2 * element] * 2)
    # Out: 0 sends a head of 1096 tokens, 1 its only head of 3000; then 0 its other two.
    assert list(outward.hidden[0]) == pytest.approx([3000 * element] * 2)
    assert list(outward.shown[0]) == pytest.approx([2 * 1096 * element] * 2)
    assert list(inward.shown[1]) == pytest.approx([3000 * element] * 2)
    assert list(inward.hidden[1]) == pytest.approx([1096 * 2 * element] * 2)
    # Backward out, keys' and values' gradients with the second half: 0 sends 2 + 6 heads of 1096 tokens.
    assert list(outward.hidden[1]) == pytest.approx([3000 * element] * 2)
    assert list(outward.shown[1]) == pytest.approx([8 * 1096 * element] * 2)
    assert list((inward.shown + inward.hidden)[0]) == pytest.approx([(9000 + 2192) * element] * 2)


def test_sums_inside_a_unit_by_hand():
    job = tiny_job(tensor_parallel=4)
    found = tensor_parallel_seconds(job, np.array([0.0, 1000.0]), np.full(2, 100 * GB), np.full(2, 1e-6))
    assert list(found) == pytest.approx([0, 2 * 3 / 4 * 1000 * 512 * 2 / (100 * GB) + 6e-6])
    alone = tensor_parallel_seconds(tiny_job(), np.array([1000.0]), np.array([GB]), np.array([1.0]))
    assert alone == [0]


def test_rings_by_hand():
    # Four GPUs on two nodes: 3/4 of the bytes leave a node, over the cards of both of its GPUs.
    rings = Rings(LinkTable(cluster(TWO, latency=5)))
    assert rings.seconds(whole(0, 1, 2, 3), 40 * GB, 1) == pytest.approx(3 / 2 + 3 * 5e-6)
    # Where the node has one card, over that.
    rings = Rings(LinkTable(cluster(TWO, per="node")))
    assert rings.seconds(whole(0, 1, 2, 3), 40 * GB, 1) == pytest.approx(3)
    # Two tensor-parallel rings over one card a node.
    assert rings.seconds(whole(0, 2), 40 * GB, 2) == pytest.approx(2 * 2)
    assert rings.seconds(whole(0), 40 * GB, 2) == 0


def test_the_node_with_the_fewest_cards_in_use_sets_the_pace():
    rings = Rings(LinkTable(cluster([("a", "PLAIN", 4), ("b", "PLAIN", 2)])))
    assert rings.seconds(whole(0, 1, 2, 3, 4, 5), 60 * GB, 1) == pytest.approx(5 / 6 * 60 / 20)
    assert rings.seconds(whole(0, 1, 2, 3, 4), 60 * GB, 1) == pytest.approx(4 / 5 * 60 / 10)
    assert rings.seconds(whole(0, 1, 2, 3), 60 * GB, 1) == pytest.approx(3 / 4 * 60 / 100)


def test_inside_a_node_all_but_the_part_that_leaves_is_handed_on():
    # Ten cards are faster than the links inside: these carry 9/10.
    rings = Rings(LinkTable(cluster([("a", "PLAIN", 10), ("b", "PLAIN", 10)], bandwidth=20)))
    assert rings.seconds(whole(*range(20)), 100 * GB, 1) == pytest.approx(19 / 20 * 100 * 9 / 10 / 100)


def test_pipeline_sends_by_hand():
    links = LinkTable(cluster(TWO))
    rows = np.array([1000.0, 3000.0])
    found = pipeline_seconds(links, tiny_job(), rows, whole(0, 1), whole(2, 3))
    assert found == pytest.approx(3000 * 512 * 2 / (10 * GB))
    halves = tiny_job(tensor_parallel=2)
    assert pipeline_seconds(links, halves, rows, whole(0, 1), whole(2, 3)) == pytest.approx(found / 2)


@given(st.data(), st.sampled_from(["gpu", "node"]))
@examples(40)
def test_between_gpus_that_are_alike_messages_take_equally_long(data, per):
    nodes = [(name, "PLAIN", 2) for name in "abcd"]
    links = LinkTable(cluster(nodes, latency=5, per=per, extra=LEVELS.replace("[c]", "[c, d]")))
    first, other = (data.draw(st.permutations(range(8)))[:4] for _ in range(2))
    size = data.draw(st.lists(st.floats(1, 1e9), min_size=12, max_size=12))
    src, dst = np.array(list(itertools.permutations(range(4), 2))).T
    one, two = (
        links.message_seconds(whole(*gpus)[src], whole(*gpus)[dst], np.array(size)) for gpus in (first, other)
    )
    if links.likeness(whole(*first)) == links.likeness(whole(*other)):
        assert one.tolist() == two.tolist()


def test_gpus_are_alike_where_the_same_ones_share_nodes_and_racks():
    nodes = [(name, "PLAIN", 2) for name in "abcd"]
    links = LinkTable(cluster(nodes, latency=5, extra=LEVELS.replace("[c]", "[c, d]")))
    of = {name: links.likeness(whole(*gpus)) for name, gpus in _SETS.items()}
    assert of["a, b"] == of["c, d"] == of["b, a"]
    assert len({of["a, b"], of["a, c"], of["a"], of["a, b a GPU each"], of["a, c a GPU each"]}) == 5


#: GPUs of four nodes of two, of which the first two and the last two share a rack.
_SETS = {
    "a": [0, 1],
    "a, b": [0, 1, 2, 3],
    "b, a": [2, 3, 0, 1],
    "c, d": [4, 5, 6, 7],
    "a, c": [0, 1, 4, 5],
    "a, b a GPU each": [0, 2],
    "a, c a GPU each": [0, 4],
}
