"""Routes, capacities and domains, worked by hand."""

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
