"""What the probe plans to measure, and what it makes of nodes, names, times and networks: no torch."""

from __future__ import annotations

import dataclasses
import itertools
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cluster import catalog
from megatron_hexi.doctor.facts import InfinibandPort
from megatron_hexi.errors import HexiError
from megatron_hexi.probe.device import find_cards
from megatron_hexi.probe.document import (
    Between,
    HostCards,
    Inside,
    Options,
    Series,
    TransferTimes,
    message_sizes,
    point_limit_s,
    sizes_for,
    transfer_limit_s,
)
from megatron_hexi.probe.merge import merge
from megatron_hexi.probe.network import bytes_per_second, collective_note, network_entry
from megatron_hexi.probe.nodes import NodeFound, device_name, find_nodes
from megatron_hexi.probe.stages import flows, local_rounds, tournament
from tests.support.probes import GPU, rank_of, transfer

#: torch's name, memory in GiB as torch shows it, the catalogue's name.
KNOWN = (
    ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM-80GB"),
    ("NVIDIA H100 PCIe", 79.2, "H100-PCIe-80GB"),
    ("NVIDIA H100 NVL", 93.1, "H100-NVL-94GB"),
    ("NVIDIA H200", 139.8, "H200-SXM-141GB"),
    ("NVIDIA B200", 178.4, "B200-180GB"),
    ("NVIDIA GH200 480GB", 94.5, "GH200-96GB"),
    ("NVIDIA A100-SXM4-80GB", 79.3, "A100-SXM-80GB"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM-40GB"),
    ("NVIDIA A100 80GB PCIe", 79.3, "A100-PCIe-80GB"),
    ("NVIDIA A800-SXM4-80GB", 79.3, "A800-SXM-80GB"),
    ("NVIDIA L40S", 44.5, "L40S-48GB"),
    ("NVIDIA L40", 44.5, "L40-48GB"),
    ("NVIDIA L4", 22.0, "L4-24GB"),
    ("NVIDIA RTX A6000", 47.5, "A6000-48GB"),
    ("NVIDIA A10G", 22.2, "A10G-24GB"),
    ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090-24GB"),
    ("NVIDIA GeForce RTX 3090", 23.7, "RTX3090-24GB"),
    ("NVIDIA GeForce RTX 3080 Ti", 11.8, "RTX3080Ti-12GB"),
    ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
    ("Tesla V100-SXM2-32GB", 31.7, "V100-SXM2-32GB"),
    ("Tesla V100-PCIE-16GB", 15.8, "V100-PCIe-16GB"),
    ("Tesla T4", 14.6, "T4-16GB"),
    ("NVIDIA H100", 95.0, "H100-SXM-96GB"),
    ("NVIDIA TITAN RTX", 23.6, "TitanRTX-24GB"),
    ("NVIDIA GeForce RTX 2080 Ti", 10.75, "RTX2080Ti-11GB"),
)


@pytest.mark.parametrize("players", range(1, 12))
def test_in_a_tournament_every_two_meet_once_in_the_fewest_rounds(players):
    rounds = tournament(players)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(players), 2))
    assert all(len({*itertools.chain(*pairs)}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (0 if players == 1 else players - 1 + players % 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_inside_nodes_of_any_sizes_every_two_ranks_meet_once(counts):
    starts = [sum(counts[:n]) for n in range(len(counts))]
    nodes = {
        n: range(start, start + count) for n, (start, count) in enumerate(zip(starts, counts, strict=True))
    }
    rounds = local_rounds(nodes)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == [(n, pair) for n, ranks in nodes.items() for pair in itertools.combinations(ranks, 2)]
    for pairs in rounds:
        busy = [rank for _, pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))


@given(st.integers(1, 12), st.integers(1, 12))
def test_all_ranks_of_two_nodes_take_part(senders, receivers):
    found = flows(range(senders), range(20, 20 + receivers))
    assert {src for src, _ in found} == set(range(senders))
    assert {dst for _, dst in found} == set(range(20, 20 + receivers))
    assert len(set(found)) == len(found) == max(senders, receivers)


def test_flops_are_counted_as_curves_count_them():
    sizes = sizes_for(Options(hidden_size=512, heads=3), "cpu")
    full = sizes.attention_flops("full", "forward", 1024)
    assert full == 4 * 3 * 128 * 1024**2
    assert sizes.attention_flops("causal", "forward", 1024) == full / 2
    assert sizes.attention_flops("causal", "backward", 1024) == 2.5 * full / 2
    assert sizes.matmul_flops(64) == 3 * 2 * 64 * 512 * 2048


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_points_and_transfers_keep_to_the_budget(kind):
    for options in (Options(), Options(quick=True, budget_s=60), Options(kernels=("math", "aten-cpu"))):
        sizes = sizes_for(options, kind)
        points = len(sizes.rows) + 4 * len(options.kernels) * len(sizes.tokens)
        assert points * point_limit_s(options, sizes) <= 0.6 * options.budget_s + 1e-9
        assert 63 * 22 * transfer_limit_s(options, 126) <= options.budget_s


def test_quick_measures_at_fewer_sizes_of_the_same():
    for kind in ("cpu", "cuda"):
        quick, whole = sizes_for(Options(quick=True), kind), sizes_for(Options(), kind)
        assert set(quick.rows) < set(whole.rows)
        assert set(quick.tokens) < set(whole.tokens)


def test_messages_leave_room_in_memory():
    sizes = sizes_for(Options(), "cuda")
    assert message_sizes(sizes, 80 * 2**30, 1)[-1] == 256 * 2**20
    assert 511 * message_sizes(sizes, 80 * 2**30, 511)[-1] <= sizes.largest_message
    assert message_sizes(sizes, 2**27, 1)[-1] <= 2**24


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("precision", "int8", "--precision int8"),
        ("hidden_size", 0, "--hidden-size 0"),
        ("heads", -1, "--heads -1"),
        ("head_dim", 5000, "--kv-channels 5000"),
        ("budget_s", 0.0, "--budget 0"),
        ("budget_s", float("nan"), "--budget nan"),
        ("kernels", ("math", "math"), "--kernel math --kernel math"),
    ],
)
def test_wrong_options_are_named(field, value, said):
    with pytest.raises(HexiError, match=said):
        Options(**{field: value})


@given(
    alpha=st.floats(0, 1e-2),
    rate=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(1, 6), min_size=2, unique=True),
)
def test_a_line_gives_its_slope(alpha, rate, sizes):
    chosen = sorted(10**8 * 4**size for size in sizes)
    found = bytes_per_second(TransferTimes(tuple(chosen), tuple(alpha + size / rate for size in chosen)))
    assert found == pytest.approx(rate, rel=1e-3)


def test_without_a_rising_line_the_plateau_counts():
    assert bytes_per_second(TransferTimes((1000,), (0.5,))) == 2000
    assert bytes_per_second(TransferTimes((1000, 4000), (0.5, 0.4))) == 10_000


@pytest.mark.parametrize(("gpu", "gib", "name"), KNOWN)
def test_known_gpus_get_the_catalogues_name(gpu, gib, name):
    info = rank_of(gpu=gpu, kind="cuda", memory_bytes=round(gib * 2**30))
    assert device_name(info, "bf16") == name
    assert device_name(info, "fp32") == f"{name}-fp32"


def test_every_gpu_of_the_catalogue_can_be_recognised():
    assert {name for _, _, name in KNOWN} == set(catalog())


@pytest.mark.parametrize(
    ("gpu", "gib", "name"),
    [
        ("NVIDIA H20", 95, "NVIDIA-H20"),
        ("NVIDIA A100-SXM4-80GB", 19, "NVIDIA-A100-SXM4-80GB"),  # a part of one
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 79, "NVIDIA-H100-80GB-HBM3-MIG-1g-10gb"),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79, "NVIDIA-H100-80GB-HBM3-MIG-7g-80gb"),
        ("NVIDIA H100 PCIe MIG 7g.80gb", 79, "NVIDIA-H100-PCIe-MIG-7g-80gb"),
        ("NVIDIA H200 MIG 7g.141gb", 139, "NVIDIA-H200-MIG-7g-141gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39, "NVIDIA-A100-SXM4-80GB-MIG-3g-40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 79, "NVIDIA-A100-SXM4-80GB-MIG-7g-80gb"),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 39, "NVIDIA-A100-SXM4-40GB-MIG-7g-40gb"),
        ("NVIDIA A100 80GB PCIe MIG 3g.40gb", 39, "NVIDIA-A100-80GB-PCIe-MIG-3g-40gb"),
        ("NVIDIA A800-SXM4-80GB MIG 7g.80gb", 79, "NVIDIA-A800-SXM4-80GB-MIG-7g-80gb"),
    ],
)
def test_other_gpus_get_a_name_of_their_own(gpu, gib, name):
    assert device_name(rank_of(gpu=gpu, kind="cuda", memory_bytes=gib * 2**30), "bf16") == name


def test_nodes_are_named_by_their_hosts():
    hosts = ["a.site.org", "a.site.org", "b", "h100", "h100-0"]
    ranks = [rank_of(host=host, local_rank=i if i < 2 else 0) for i, host in enumerate(hosts)]
    nodes = find_nodes(ranks)
    assert [node.name for node in nodes] == ["a", "b", "h100", "h100-0.1"]
    assert [list(node.ranks) for node in nodes] == [[0, 1], [2], [3], [4]]


def test_two_agents_on_one_host_are_two_nodes():
    nodes = find_nodes([rank_of(group="0"), rank_of(group="0", local_rank=1), rank_of(group="1")])
    assert [(node.name, node.ranks) for node in nodes] == [("host.0", range(2)), ("host.1", range(2, 3))]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [("a", 0, GPU), ("b", 0, GPU), ("a", 1, GPU)],
            "ranks 0, 2 are on a and others between them are not",
        ),
        ([("a", 0, GPU), ("a", 1, "another")], f"a has {GPU} and another"),
        ([("a", 1, GPU), ("a", 0, GPU)], "have the local ranks 1, 0"),
        ([("a", 0, GPU), ("a", 0, GPU)], "have the local ranks 0, 0"),
    ],
)
def test_ranks_out_of_order_are_refused(ranks, said):
    with pytest.raises(HexiError, match=said):
        find_nodes([rank_of(host=host, local_rank=local, gpu=gpu) for host, local, gpu in ranks])


def _nodes(*counts):
    starts = [sum(counts[:n]) for n in range(len(counts))]
    return [
        NodeFound(f"n{n}", range(start, start + count))
        for n, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def _between(nodes, gb_s, one_gb_s=None, latency_us=10.0):
    """Pairs both ways; `gb_s` is a number or a function of the two nodes."""
    rate = gb_s if callable(gb_s) else lambda a, b: gb_s
    return [
        Between(a, b, transfer(rate(a, b)), transfer(one_gb_s) if one_gb_s else None, latency_us / 1e6)
        for a, b in itertools.permutations(range(len(nodes)), 2)
    ]


def test_equal_pairs_are_one_network_of_shared_links():
    nodes = _nodes(8, 8, 4)
    found = network_entry(nodes, _between(nodes, lambda a, b: 25 + (a - b) / 4, one_gb_s=24))
    assert found == ({"network": {"bandwidth_gb_s": 25.0, "latency_us": 10.0, "per": "node"}}, {})


def test_cards_of_their_own_show_when_all_ranks_send():
    nodes = _nodes(8, 8)
    found, _ = network_entry(nodes, _between(nodes, 198, one_gb_s=25))
    assert found["network"]["per"] == "gpu"
    assert found["network"]["bandwidth_gb_s"] == pytest.approx(198 / 8)


def test_pairs_that_nothing_explains_are_a_matrix_of_whole_nodes():
    nodes = _nodes(2, 2, 2, 2)
    rates = {(0, 1): 100, (2, 3): 100, (0, 2): 10, (1, 3): 40, (0, 3): 20, (1, 2): 20}
    found, own = network_entry(nodes, _between(nodes, lambda a, b: rates[min(a, b), max(a, b)], one_gb_s=5))
    assert found["matrix"]["nodes"] == ["n0", "n1", "n2", "n3"]
    assert own == {}
    for row, measured in enumerate(found["matrix"]["bandwidth_gb_s"]):
        expected = [0 if row == c else rates[min(row, c), max(row, c)] for c in range(4)]
        assert measured == pytest.approx(expected, rel=1e-3)


def test_nodes_with_other_cards_have_networks_of_their_own():
    """Eight cards, four, and one; a pair has what the node with less has."""
    nodes = [dataclasses.replace(node, host=node.name) for node in _nodes(8, 8, 8, 8, 4)]
    way, cards = [400, 400, 100, 100, 12.5], [8, 8, 4, 4, 1]
    pairs = [
        Between(a, b, transfer(min(way[a], way[b])), transfer(min(way[n] / cards[n] for n in (a, b))), 10e-6)
        for a, b in itertools.permutations(range(5), 2)
    ]
    found, own = network_entry(nodes, pairs)
    assert found == {}
    assert [(one["cards"], one["bandwidth_gb_s"]) for one in own.values()] == [
        (8, 50.0),
        (8, 50.0),
        (4, 25.0),
        (4, 25.0),
        (1, 12.5),
    ]
    assert {one["fabric"] for one in own.values()} == {"network"}


def _two_fabrics():
    """Two nodes with InfiniBand, two with RoCE, and 5 GB/s between, 40 µs longer."""
    hosts = [HostCards("infiniband", 2, 400.0)] * 2 + [HostCards("roce", 1, 100.0)] * 2
    nodes = [
        dataclasses.replace(node, cards=cards) for node, cards in zip(_nodes(2, 2, 2, 2), hosts, strict=True)
    ]
    way = [90, 90, 12, 12]
    return nodes, [
        Between(a, b, transfer(min(way[a], way[b])), None, 10e-6)
        if (a < 2) == (b < 2)
        else Between(a, b, transfer(5), None, 50e-6)
        for a, b in itertools.permutations(range(4), 2)
    ]


def test_fabrics_that_meet_over_a_slower_network():
    found, own = network_entry(*_two_fabrics())
    assert found == {"fabrics": [{"bandwidth_gb_s": 5.0, "per": "node", "latency_us": pytest.approx(40)}]}
    assert own[0] == {"cards": 2, "bandwidth_gb_s": 45.0, "latency_us": 10.0, "fabric": "infiniband"}
    assert own[3] == {"cards": 1, "bandwidth_gb_s": 12.0, "latency_us": 10.0, "fabric": "roce"}


def test_fabrics_whose_pairs_differ_are_a_matrix():
    nodes, pairs = _two_fabrics()
    pairs = [
        dataclasses.replace(pair, all_ranks=transfer(2)) if (pair.src, pair.dst) == (0, 3) else pair
        for pair in pairs
    ]
    assert "matrix" in network_entry(nodes, pairs)[0]


def test_latencies_that_differ_by_node_are_the_node_s():
    nodes = _nodes(1, 1, 1)
    pairs = [
        dataclasses.replace(pair, latency_s=500e-6 if 2 in (pair.src, pair.dst) else 10e-6)
        for pair in _between(nodes, 10)
    ]
    found, own = network_entry(nodes, pairs)
    assert found == {}
    assert [one["latency_us"] for one in own.values()] == [10, 10, 500]


def _port(rate, state="ACTIVE", layer="InfiniBand"):
    return InfinibandPort("mlx5_0", 1, state, rate, layer)


@pytest.mark.parametrize(
    ("ports", "environment", "found"),
    [
        ([_port("400 Gb/sec (4X NDR)")] * 8, {}, HostCards("infiniband", 8, 400.0)),
        ([_port("100 Gb/sec (4X EDR)", layer="Ethernet")] * 2, {}, HostCards("roce", 2, 100.0)),
        (
            [_port("25 Gb/sec", layer="Ethernet")] * 4 + [_port("200 Gb/sec")] * 2,
            {},
            HostCards("infiniband", 2, 200.0),
        ),
        ([_port("400 Gb/sec"), _port("400 Gb/sec", "DOWN")], {}, HostCards("infiniband", 1, 400.0)),
        ([_port("400 Gb/sec")], {"NCCL_IB_DISABLE": "1"}, None),
        ([_port("", "unknown", "")], {}, None),
        ([], {}, None),
    ],
)
def test_cards_are_those_that_the_kernel_shows_as_up(ports, environment, found):
    assert find_cards(ports, environment) == found


def test_a_slow_all_to_all_is_named():
    port, twice = transfer(10), transfer(5)
    assert collective_note([Inside(0, port, port, port, 1e-5)]) is None
    assert "2.0" in (collective_note([Inside(0, port, twice, port, 1e-5)]) or "")


def _series(*rows):
    return Series(tuple(2**i for i in range(len(rows[0]))), rows)


def test_ranks_of_a_node_are_merged_by_median_and_a_straggler_is_named():
    (node,) = _nodes(3)
    found = merge("G", {0: node}, {"matmul": _series((10.0, 20.0), (10.2, 20.2), (8.0, 16.0))})
    assert found.curves == {"matmul": {1: 10.0, 2: 20.0}}
    assert found.speeds == {0: 1.0}
    assert any("rank 2 (n0) runs at 0.8" in note for note in found.notes)


def test_a_slow_node_gets_its_own_speed_and_lends_its_sizes():
    fast, slow, other = _nodes(1, 1, 1)
    curves = {"matmul": _series((10.0, 20.0, None), (5.0, 10.0, 14.0), (10.2, 19.8, None))}
    found = merge("G", {0: fast, 1: slow, 2: other}, curves)
    assert found.speeds[1] == pytest.approx(0.5, rel=0.02)
    assert (found.speeds[0], found.speeds[2]) == (1.0, 1.0)
    assert found.curves["matmul"][4] == pytest.approx(28, rel=0.02)
    assert found.curves["matmul"][2] == pytest.approx(median([20, 10 / found.speeds[1], 19.8]))


def test_of_two_nodes_the_faster_is_the_reference():
    slow, fast = _nodes(1, 1)
    found = merge("G", {0: slow, 1: fast}, {"matmul": _series((5.0,), (10.0,))})
    assert found.curves["matmul"] == {1: 10.0}
    assert found.speeds == {0: 0.5, 1: 1.0}
