"""Cluster files: the good ones read as they stand, each broken one is refused in one line."""

import re
from pathlib import Path

import pytest

from megatron_hexi.cluster import catalog, cluster_digest, read_cluster
from tests.support.cluster_files import DEVICE, FABRICS, GOOD, LEVELS, MATRIX

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"


def test_the_design_s_example_reads_as_it_stands(write):
    cluster = read_cluster(write(GOOD))
    assert (cluster.name, len(cluster.ranks), len(cluster.nodes)) == ("mixed-16", 16, 2)
    assert [cluster.ranks[rank].device.name for rank in (7, 8)] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    assert (cluster.tiers[0].per, cluster.tiers[0].bandwidths) == ("node", (25e9, 25e9))


@pytest.mark.parametrize(("text", "ranks"), [(MATRIX, 6), (LEVELS, 40), (GOOD + DEVICE, 16), (FABRICS, 20)])
def test_other_good_files(write, text, ranks):
    assert len(read_cluster(write(text)).ranks) == ranks


@pytest.mark.parametrize(("name", "ranks"), [("mixed-16", 16), ("mixed-32", 32), ("fleet-96", 96)])
def test_the_examples_are_good(name, ranks):
    cluster = read_cluster(EXAMPLES / f"{name}.yaml")
    assert (cluster.name, len(cluster.ranks)) == (name, ranks)
    page = (EXAMPLES.parents[1] / "docs" / "cluster-file.md").read_text()
    assert (EXAMPLES / f"{name}.yaml").read_text() in page


def test_a_single_node_needs_no_network(write):
    assert len(read_cluster(write("name: one\nnodes: [{name: a, gpu: T4-16GB, gpus: 4}]\n")).ranks) == 4


def test_a_gpu_that_only_the_file_knows(write):
    text = """\
name: other
nodes: [{name: x, gpu: MI300X, gpus: 8}]
devices:
  MI300X:
    memory_gb: 192
    usable_gib: 187
    memory_gb_s: 5300
    capability: [9, 4]
    nominal: {bf16: 1300}
    link: {kind: XGMI, bandwidth_gb_s: 300, latency_us: 5, source: us}
    matmul: {points: [[4096, 600]], source: us}
    attention:
      ours:
        causal: {forward: {points: [[4096, 300]], source: us}, backward: {points: [[4096, 200]], source: us}}
        full: {forward: {points: [[4096, 320]], source: us}, backward: {points: [[4096, 220]], source: us}}
"""
    device = read_cluster(write(text)).ranks[0].device
    assert (device.name, device.kernels, device.attention().causal.forward.rate(8192)) == (
        "MI300X",
        ("ours",),
        300,
    )


def test_host_memory_is_the_nodes_or_the_catalogue_s(write):
    own = read_cluster(
        write(GOOD.replace("gpus: 8}", "gpus: 8, host: {usable_gib: 640, bandwidth_gb_s: 20}}", 1))
    )
    (node, *_) = own.nodes
    assert node.device.host is not None
    assert (node.device.host.usable_gib, node.device.host.bandwidth_gb_s) == (80, 20)
    usual = catalog()[node.device.name].host
    assert usual is not None
    assert node.device.host.memory_gb_s == usual.memory_gb_s
    assert {rank.device.host for rank in own.ranks if rank.node == 0} == {node.device.host}
    assert read_cluster(write(GOOD)).nodes[0].device.host == usual


def test_the_digest_is_of_what_the_file_says(write):
    digest = cluster_digest(read_cluster(write(GOOD)))
    assert re.fullmatch("[0-9a-f]{64}", digest)
    same_machines = (
        GOOD.replace("mixed-16", "renamed"),
        GOOD.replace("count: 1, ", ""),
        GOOD.replace("count: 1", "hosts: h1", 1),
        GOOD.replace("count: 1", "hosts: [h1]", 1),
        GOOD + "levels: []\nfabrics: []\n",
    )
    for same in same_machines:
        assert cluster_digest(read_cluster(write(same))) == digest
    for other in (GOOD.replace("25", "26"), GOOD.replace("gpus: 8}\nn", "gpus: 4}\nn"), GOOD + DEVICE):
        assert cluster_digest(read_cluster(write(other))) != digest


def test_plans_of_earlier_versions_know_their_cluster():
    """Fields that were added since change no digest of a file without them."""
    assert cluster_digest(read_cluster(EXAMPLES / "mixed-32.yaml")).startswith("04421fcd45f2f576")
