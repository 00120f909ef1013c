"""Routes, capacities and domains, worked by hand."""

import itertools

import pytest
import yaml

from megatron_hexi.cluster import LinkId, Route, read_cluster


@pytest.fixture
def cluster_of(tmp_path):
    """A cluster from fields of its file."""

    def build(**fields):
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump({"name": "test", **fields}, sort_keys=False))
        return read_cluster(path)

    return build


def node(name, count=1, gpus=2, gpu="H100-SXM-80GB", **more):
    return {"name": name, "count": count, "gpu": gpu, "gpus": gpus, **more}


TWO = [node("fast"), node("slow", gpu="A100-SXM-80GB", gpus=3)]


def test_ranks_follow_the_file(cluster_of):
    cluster = cluster_of(nodes=[node("a", count=2), node("b", gpus=1)], network={"bandwidth_gb_s": 25})
    assert [(r.rank, r.node, r.local) for r in cluster.ranks] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
        (4, 2, 0),
    ]
    assert [n.name for n in cluster.nodes] == ["a-0", "a-1", "b-0"]
    assert cluster.rank_name(3) == "a-1/1"


def test_inside_a_node_a_transfer_takes_two_ports(cluster_of):
    cluster = cluster_of(nodes=TWO, network={"bandwidth_gb_s": 25})
    route = cluster.route(0, 1)
    assert route == Route((LinkId(0, "gpu", 0, "out"), LinkId(0, "gpu", 1, "in")), 5e-6)
    assert [cluster.capacity(link) for link in route.links] == [378e9, 378e9]
    assert cluster.bandwidth(2, 3) == 252e9
    assert [cluster.link_name(link) for link in route.links] == ["fast-0/0 port out", "fast-0/1 port in"]


def test_a_rank_reaches_itself_at_once(cluster_of):
    cluster = cluster_of(nodes=TWO, network={"bandwidth_gb_s": 25})
    assert cluster.route(1, 1) == Route((), 0)
    assert cluster.bandwidth(1, 1) == float("inf")


def test_between_nodes_that_share_a_card(cluster_of):
    cluster = cluster_of(nodes=TWO, network={"bandwidth_gb_s": 25, "latency_us": 10, "per": "node"})
    first, second = cluster.route(0, 2), cluster.route(1, 4)
    assert first == second == Route((LinkId(1, "node", 0, "out"), LinkId(1, "node", 1, "in")), 10e-6)
    assert cluster.route(2, 0).links == (LinkId(1, "node", 1, "out"), LinkId(1, "node", 0, "in"))
    assert cluster.bandwidth(0, 2) == 25e9
    assert cluster.link_name(first.links[0]) == "fast-0 network out"


def test_between_nodes_with_a_card_for_each_gpu(cluster_of):
    cluster = cluster_of(nodes=TWO, network={"bandwidth_gb_s": 50, "per": "gpu"})
    assert cluster.route(1, 4).links == (LinkId(1, "gpu", 1, "out"), LinkId(1, "gpu", 4, "in"))
    assert not set(cluster.route(0, 2).links) & set(cluster.route(1, 4).links)


def three_levels(cluster_of, per):
    return cluster_of(
        nodes=[node("a", count=4), node("b", count=2)],
        network={"bandwidth_gb_s": 50, "latency_us": 10, "per": "gpu"},
        levels=[
            {
                "name": "rack",
                "groups": [["a-0..1"], ["a-2", "a-3"], ["b"]],
                "bandwidth_gb_s": 40,
                "latency_us": 2,
                "per": per,
            },
            {"name": "site", "groups": [["a"], ["b"]], "bandwidth_gb_s": 5, "latency_us": 1000},
        ],
    )


def test_a_route_climbs_as_far_as_the_ranks_differ(cluster_of):
    cluster = three_levels(cluster_of, "group")
    assert [cluster.distance(0, dst) for dst in (1, 2, 4, 8)] == [0, 1, 2, 3]
    assert cluster.route(0, 2) == Route((LinkId(1, "gpu", 0, "out"), LinkId(1, "gpu", 2, "in")), 10e-6)
    rack = cluster.route(0, 4)
    assert rack.links == (
        LinkId(1, "gpu", 0, "out"),
        LinkId(2, "group", 0, "out"),
        LinkId(2, "group", 1, "in"),
        LinkId(1, "gpu", 4, "in"),
    )
    assert rack.latency_s == pytest.approx(12e-6)
    site = cluster.route(1, 11)
    assert site.links == (
        LinkId(1, "gpu", 1, "out"),
        LinkId(2, "group", 0, "out"),
        LinkId(3, "group", 0, "out"),
        LinkId(3, "group", 1, "in"),
        LinkId(2, "group", 2, "in"),
        LinkId(1, "gpu", 11, "in"),
    )
    assert site.latency_s == pytest.approx(1012e-6)
    assert [cluster.capacity(link) for link in site.links] == [50e9, 40e9, 5e9, 5e9, 40e9, 50e9]
    assert cluster.link_name(site.links[2]) == "site 0 out"


@pytest.mark.parametrize(("per", "owner"), [("gpu", 1), ("node", 0), ("group", 0)])
def test_a_level_s_link_belongs_to_what_per_says(cluster_of, per, owner):
    cluster = three_levels(cluster_of, per)
    assert cluster.route(1, 5).links[1] == LinkId(2, per, owner, "out")
    assert cluster.bandwidth(1, 5) == 40e9


def test_fast_domains_are_nested(cluster_of):
    cluster = three_levels(cluster_of, "group")
    domains = cluster.fast_domains()
    assert [(d.name, len(d.parts)) for d in domains] == [
        ("node", 6),
        ("rack", 3),
        ("site", 2),
        ("cluster", 1),
    ]
    assert domains[1].parts == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert domains[3].parts == (tuple(range(12)),)


def test_fast_domains_of_one_node(cluster_of):
    assert [d.name for d in cluster_of(nodes=[node("a")]).fast_domains()] == ["node"]


def test_intra_and_speed_and_memory_replace_the_catalogue_s(cluster_of):
    cluster = cluster_of(
        nodes=[node("a", intra={"bandwidth_gb_s": 450}, speed=0.5, memory_gb=40.0), node("b")],
        network={"bandwidth_gb_s": 25},
    )
    slow, fast = cluster.nodes[0].device, cluster.nodes[1].device
    assert cluster.bandwidth(0, 1) == 450e9
    assert cluster.route(0, 1).latency_s == 5e-6
    assert slow.matmul.rate(8192) == pytest.approx(fast.matmul.rate(8192) / 2)
    assert slow.attention("cudnn").full.backward.rate(16384) == 516 / 2
    assert (slow.memory_gb, slow.usable_gib) == (40, 39)


@pytest.fixture
def measured(cluster_of):
    """Three nodes; a-0 and a-1 are close, b-0 is far; listed in another order than the nodes."""
    return cluster_of(
        nodes=[node("a", count=2), node("b")],
        matrix={
            "nodes": ["b-0", "a-0", "a-1"],
            "bandwidth_gb_s": [[0, 6.0, 7.0], [5.0, None, 48.0], [5.5, 40.0, 0]],
            "latency_us": [[0, 31, 32], [33, 0, 12], [34, 13, 0]],
        },
    )


def test_a_measured_pair_stands_between_the_nodes_ways(measured):
    route = measured.route(1, 2)  # a-0 to a-1
    assert route.links == (
        LinkId(1, "node", 0, "out"),
        LinkId(1, "pair", 1, "out"),
        LinkId(1, "node", 1, "in"),
    )
    assert route.latency_s == pytest.approx(12e-6)
    assert [measured.capacity(link) for link in route.links] == [48e9, 48e9, 48e9]
    assert measured.bandwidth(2, 0) == 40e9
    # b-0 sends 6 to a-0 and 7 to a-1: it can send 7 in all.
    assert [measured.capacity(link) for link in measured.route(4, 0).links] == [7e9, 6e9, 40e9]
    assert measured.link_name(route.links[1]) == "a-0 to a-1"
    assert measured.link_name(route.links[0]) == "a-0 network out"
    assert measured.distance(0, 4) == 1


def test_measured_domains_join_the_fastest_first(measured):
    domains = measured.fast_domains()
    assert [d.name for d in domains] == ["node", "32 GB/s", "4 GB/s"]
    assert domains[1].parts == ((0, 1, 2, 3), (4, 5))
    assert domains[2].parts == ((0, 1, 2, 3, 4, 5),)


def mixed(**more):
    """Nodes with eight cards, with four for eight GPUs, and with one; the last in a fabric of its own."""
    each = {"cards": 8, "gbit_s": 400}, {"cards": 4, "gbit_s": 200}, {"gbit_s": 100, "latency_us": 30}
    nodes = [node(name, 2, 8, network=dict(network)) for name, network in zip("abc", each, strict=True)]
    nodes[2]["network"]["fabric"] = "roce"
    return {"nodes": nodes, "fabrics": [{"gbit_s": 80, "latency_us": 5, **more}]}


def test_each_kind_of_node_has_its_cards(cluster_of):
    cluster = cluster_of(**mixed())
    assert cluster.route(0, 8).links == (LinkId(1, "card", 0, "out"), LinkId(1, "card", 8, "in"))
    assert [cluster.bandwidth(0, dst) for dst in (8, 16, 24, 32)] == [50e9, 25e9, 25e9, 10e9]
    # GPUs 2 and 3 of a node with four cards use the second one.
    assert cluster.route(18, 8).links[0] == cluster.route(19, 8).links[0] == LinkId(1, "card", 17, "out")
    assert cluster.route(20, 8).links[0] == LinkId(1, "card", 18, "out")
    names = [cluster.link_name(cluster.route(src, 40).links[0]) for src in (15, 18, 32)]
    assert names == ["a-1/7 network out", "b-0/2-3 network out", "c-0 network out"]
    assert [cluster.sharers(cluster.route(src, 40).links[0]) for src in (0, 18, 32)] == [1, 2, 8]
    # Of two nodes the longer latency counts, and crossing the fabrics adds to it.
    assert [cluster.route(0, dst).latency_s for dst in (8, 16, 32)] == pytest.approx([10e-6, 10e-6, 35e-6])


def test_fabrics_are_domains(cluster_of):
    domains = cluster_of(**mixed()).fast_domains()
    assert [(d.name, len(d.parts)) for d in domains] == [("node", 6), ("fabrics", 2), ("cluster", 1)]


@pytest.mark.parametrize(("per", "owner"), [("gpu", 3), ("node", 0), ("fabric", 0)])
def test_what_joins_fabrics_belongs_to_what_per_says(cluster_of, per, owner):
    link = cluster_of(**mixed(per=per)).route(3, 32).links[1]
    assert link == LinkId(2, "group" if per == "fabric" else per, owner, "out")


def test_fabrics_join_from_inside_out(cluster_of):
    names = {"a": "ib", "b": "roce", "c": "ethernet"}
    nodes = [node(name, network={"gbit_s": 400, "fabric": fabric}) for name, fabric in names.items()]
    joins = [{"meet": ["ib", "roce"], "gbit_s": 80}, {"gbit_s": 8, "latency_us": 50}]
    cluster = cluster_of(nodes=nodes, fabrics=joins)
    assert [cluster.bandwidth(0, dst) for dst in (2, 4)] == [10e9, 1e9]
    assert [cluster.route(2, dst).latency_s for dst in (0, 4)] == pytest.approx([10e-6, 60e-6])


@pytest.mark.parametrize("per", ["gpu", "node"])
def test_cards_at_each_node_are_what_one_network_says(cluster_of, per):
    """The same routes, sharing and bandwidths, whichever way they are spelled."""
    nodes = [node("a", 2, 4), node("b", 1, 3)]
    common = cluster_of(nodes=nodes, network={"bandwidth_gb_s": 12.5, "latency_us": 4, "per": per})
    cards = [{"cards": one["gpus"] if per == "gpu" else 1, "gbit_s": 100, "latency_us": 4} for one in nodes]
    own = cluster_of(nodes=[one | {"network": two} for one, two in zip(nodes, cards, strict=True)])
    for src in range(11):
        for dst in range(11):
            found, wanted = own.route(src, dst), common.route(src, dst)
            assert found.latency_s == wanted.latency_s
            assert [link.owner for link in found.links] == [link.owner for link in wanted.links]
            for one, other in zip(found.links, wanted.links, strict=True):
                assert own.capacity(one) == common.capacity(other)
                assert own.sharers(one) == common.sharers(other)


@pytest.mark.parametrize("per", ["gpu", "node"])
def test_a_line_rate_of_all_nodes_and_of_levels_is_an_eighth_in_bytes(cluster_of, per):
    nodes, groups = [node("a", 2, 4), node("b", 1, 3)], [["a"], ["b"]]

    def build(network, level):
        levels = [{"name": "rack", "groups": groups, **level}]
        return cluster_of(nodes=nodes, network={"per": per, **network}, levels=levels)

    in_bits = build({"gbit_s": 100}, {"gbit_s": 200})
    assert in_bits.tiers == build({"bandwidth_gb_s": 12.5}, {"bandwidth_gb_s": 25}).tiers
    assert [in_bits.bandwidth(*ends) for ends in ((0, 4), (4, 0))] == [12.5e9, 12.5e9]
    assert 25e9 in in_bits.tiers[1].bandwidths


def test_more_cards_than_gpus_are_each_gpu_s_part_of_them(cluster_of):
    cluster = cluster_of(nodes=[node("a", 2, 4, network={"cards": 8, "gbit_s": 200})])
    assert cluster.route(1, 5).links[0] == LinkId(1, "card", 1, "out")
    assert cluster.bandwidth(1, 5) == 50e9


def test_a_network_at_some_nodes_replaces_the_file_s(cluster_of):
    own = node("b", 1, 2, network={"cards": 2, "gbit_s": 80})
    cluster = cluster_of(nodes=[node("a", 2), own], network={"bandwidth_gb_s": 5, "per": "node"})
    assert [cluster.bandwidth(*ends) for ends in ((0, 2), (0, 4), (4, 0))] == [5e9, 5e9, 5e9]
    assert cluster.capacity(cluster.route(5, 0).links[0]) == 10e9


def test_slower_links_and_fewer_nodes_keep_each_node_s_cards(cluster_of):
    cluster = cluster_of(**mixed())
    slow = cluster.at_bandwidths({(1, 2): 0.5, (2, 4): 0.1})  # b-0's cards; c-0's way to the other fabric
    assert [slow.capacity(slow.route(src, 0).links[0]) for src in (16, 17, 24)] == [12.5e9, 12.5e9, 25e9]
    assert [slow.capacity(slow.route(src, 0).links[1]) for src in (32, 40)] == [1e9, 10e9]
    left = cluster.without([0, 2])  # a-1, b-1, c-0, c-1
    assert [left.bandwidth(0, dst) for dst in (8, 16)] == [25e9, 10e9]
    assert left.link_name(left.route(10, 0).links[0]) == "b-1/2-3 network out"
    assert left.route(10, 0).links[0] == LinkId(1, "card", 9, "out")
    assert left.distance(0, 16) == 2


def test_4096_gpus_are_no_burden(cluster_of):
    cluster = cluster_of(
        nodes=[node("a", count=512, gpus=8)],
        network={"bandwidth_gb_s": 50, "per": "gpu"},
        levels=[
            {
                "name": "rack",
                "groups": [[f"a-{4 * i}..{4 * i + 3}"] for i in range(128)],
                "bandwidth_gb_s": 400.0,
            }
        ],
    )
    routes = [cluster.route(src, (src * 37 + 11) % 4096) for src in range(4096) for _ in range(10)]
    assert len(routes) == 40960
    assert len(cluster.fast_domains()[1].parts) == 128


#: Links between the GPUs of a DGX-1V by nvidia-smi's matrix.
CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


def most_rings(rings, links):
    """Most rings that share no link, of which there are so many between two GPUs; each runs both ways."""
    return max(
        (
            1 + most_rings(rings[number:], {hop: count - (hop in ring) for hop, count in links.items()})
            for number, ring in enumerate(rings)
            if all(links[hop] for hop in ring)
        ),
        default=0,
    )


@pytest.mark.parametrize("width", [2, 4, 8])
def test_units_of_v100_have_the_rings_that_a_cube_mesh_has(cluster_of, width):
    links = {frozenset((a, b)): CUBE_MESH[a][b] for a in range(8) for b in range(a)}
    used = []
    for first, *others in itertools.batched(range(8), width):
        orders = (order for order in itertools.permutations(others) if width == 2 or order[0] < order[-1])
        rings = [
            [frozenset(hop) for hop in itertools.pairwise((first, *order, first))][
                : 1 if width == 2 else None
            ]
            for order in orders
        ]
        found = most_rings([ring for ring in rings if all(links[hop] for hop in ring)], links)
        used.append(found if width == 2 else 2 * found)
    v100 = cluster_of(nodes=[node("a", gpus=8, gpu="V100-SXM2-16GB")]).nodes[0]
    assert v100.unit_bandwidth(width) / v100.bandwidth == pytest.approx(min(used) / 6, rel=1e-3)
    measured = node("a", gpus=8, gpu="V100-SXM2-16GB", intra={"bandwidth_gb_s": 20})
    assert cluster_of(nodes=[measured]).nodes[0].unit_bandwidth(width) == 20e9
