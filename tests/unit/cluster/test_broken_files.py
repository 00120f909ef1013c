"""Mistakes that a person can make in a cluster file are refused, each by one clear line."""

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.errors import ClusterError, HexiError
from tests.support.cluster_files import DEVICE, FABRICS, GOOD, LEVELS, MATRIX


def broken(text, old, new):
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


#: What is broken, the file, and what its error must have: the line, the place and value, the remedy.
BROKEN = {
    "unknown gpu": (
        broken(GOOD, "H100-SXM-80GB", "H100"),
        ":3: nodes[0].gpu = 'H100' is not in the catalogue; did you mean H100-SXM-80GB or H100-NVL-94GB or ",
    ),
    "misspelled gpu": (
        broken(GOOD, "A100-SXM-80GB", "A100-SMX-80GB"),
        ":4: nodes[1].gpu = 'A100-SMX-80GB' is not in the catalogue; did you mean A100-SXM-80GB",
    ),
    "gpu like none": (broken(GOOD, "H100-SXM-80GB", "abacus"), "; `hexi catalog` lists those that are"),
    "negative bandwidth": (
        broken(GOOD, "25", "-25"),
        ":5: network.bandwidth_gb_s = -25 is too small; write a number above 0",
    ),
    "zero bandwidth": (broken(GOOD, "25", "0"), ":5: network.bandwidth_gb_s = 0 is too small"),
    "endless bandwidth": (broken(GOOD, "25", ".inf"), ":5: network.bandwidth_gb_s = inf is "),
    "bandwidth in words": (
        broken(GOOD, "25", "fast"),
        ":5: network.bandwidth_gb_s = 'fast' is not a number; write one",
    ),
    "bandwidth true": (broken(GOOD, "25", "true"), "network.bandwidth_gb_s = True is not a number"),
    "bandwidth in bytes": (broken(GOOD, "25", "25000000000"), "is too large; the most is 1000000"),
    "negative latency": (
        broken(GOOD, "latency_us: 10", "latency_us: -1"),
        "network.latency_us = -1 is too small; the least is 0",
    ),
    "no gpus": (broken(GOOD, "gpus: 8", "gpus: 0"), ":3: nodes[0].gpus = 0 is too small; the least is 1"),
    "half a gpu": (broken(GOOD, "gpus: 8", "gpus: 0.5"), ":3: nodes[0].gpus = 0.5 is not a whole number"),
    "a million gpus": (
        broken(GOOD, "gpus: 8", "gpus: 1000000"),
        "nodes[0].gpus = 1000000 is too large; the most is 65536",
    ),
    "a million together": (
        broken(GOOD, "count: 1", "count: 65536"),
        ":3: nodes have 524296 GPUs in all; at most 65536 are planned for; correct count or gpus",
    ),
    "no count": (broken(GOOD, "count: 1", "count: 0"), "nodes[0].count = 0 is too small"),
    "name twice": (
        broken(GOOD, "name: a100", "name: h100"),
        ":4: nodes[1].name = 'h100' is that of nodes[0]; ",
    ),
    "name of a node": (
        broken(GOOD, "name: a100", "name: h100-0"),
        ":4: nodes[1].name = 'h100-0' is what node 0 of nodes[0] is called",
    ),
    "bad name": (broken(GOOD, "name: h100", "name: a b"), ":3: nodes[0].name = 'a b' is no usable name; "),
    "range as name": (broken(GOOD, "name: h100", "name: a..b"), "nodes[0].name = 'a..b' is no usable name; "),
    "number as name": (broken(GOOD, "mixed-16", "16"), ":1: name = 16 is not text; put it in quotes"),
    "unknown field": (
        broken(GOOD, "network:", "netwrk:"),
        ":5: netwrk is not a known field; did you mean network?",
    ),
    "unknown field of a node": (broken(GOOD, "gpus: 8", "gpu_count: 8"), "nodes[0].g"),
    "unknown field of a network": (
        broken(FABRICS, "cards: 8, gbit_s", "cards: 8, gbits"),
        ":3: nodes[0].network.gbits is not a known field; did you mean gbit_s?",
    ),
    "unknown field unlike any": (
        GOOD + "zzz: 1\n",
        "zzz is not a known field; remove it or correct its name",
    ),
    "no network": (
        GOOD[: GOOD.index("network")],
        "network is missing: the 2 nodes cannot reach each other; add it",
    ),
    "no nodes": (
        broken(GOOD, GOOD[GOOD.index("nodes") : GOOD.index("network")], "nodes: []\n"),
        ":2: nodes = [] is empty; give at least 1",
    ),
    "nodes as text": (
        broken(GOOD, GOOD[GOOD.index("nodes") : GOOD.index("network")], "nodes: many\n"),
        ":2: nodes = 'many' is not a list; write one",
    ),
    "nodes missing": (
        broken(GOOD, GOOD[GOOD.index("nodes") : GOOD.index("network")], ""),
        "nodes is missing; add it",
    ),
    "a node as text": (
        broken(GOOD, "- {name: h100, count: 1, gpu: H100-SXM-80GB, gpus: 8}", "- h100"),
        ":3: nodes[0] = 'h100' is not a mapping",
    ),
    "bad per": (
        broken(GOOD, "10}", "10, per: rack}"),
        ":5: network.per = 'rack' is not known; write 'gpu' or 'node'",
    ),
    "too slow": (
        broken(GOOD, "gpus: 8", "gpus: 8, speed: 0"),
        "nodes[0].speed = 0 is too small; write a number above 0",
    ),
    "no memory": (broken(GOOD, "gpus: 8", "gpus: 8, memory_gb: -4"), "nodes[0].memory_gb = -4 is too small"),
    "host memory that nothing reaches": (
        broken(GOOD, "gpus: 8", "gpus: 8, host: {usable_gib: 100, bandwidth_gb_s: 0}"),
        "nodes[0].host.bandwidth_gb_s = 0 is too small",
    ),
    "dead links inside": (
        broken(GOOD, "gpus: 8", "gpus: 8, intra: {bandwidth_gb_s: 0}"),
        "nodes[0].intra.bandwidth_gb_s = 0 is too small",
    ),
    "unknown node in a level": (
        broken(LEVELS, "a-2..3, b", "a-2..3, c"),
        ":7: levels[0].groups[1][1] = 'c' is no node; the file has a-0..3, b-0..0",
    ),
    "range too far": (
        broken(LEVELS, "a-2..3", "a-2..99999999999"),
        "levels[0].groups[1][0] = 'a-2..99999999999' is no node; ",
    ),
    "range backwards": (broken(LEVELS, "a-2..3", "a-3..2"), "levels[0].groups[1][0] = 'a-3..2' is no node; "),
    "node left out": (
        broken(LEVELS, "a-2..3, b", "a-2..3"),
        ":7: levels[0].groups leave b-0 out; put every node into a group",
    ),
    "node in two groups": (
        broken(LEVELS, "a-2..3, b", "a-1..3, b"),
        "levels[0].groups[1][0] = a-1..3 puts a-1 into a group again; ",
    ),
    "levels not nested": (
        broken(LEVELS, "[[a, b]]", "[[a], [b]]"),
        ":8: levels[1].groups part a-2 from b-0, which a level inside joins; ",
    ),
    "empty group": (
        broken(LEVELS, "[[a, b]]", "[[a, b], []]"),
        "levels[1].groups[1] = [] is empty; give at least 1",
    ),
    "level name taken": (
        broken(LEVELS, "name: site", "name: rack"),
        ":8: levels[1].name = 'rack' is taken; ",
    ),
    "level cut off": (
        broken(LEVELS, "bandwidth_gb_s: 10,", "bandwidth_gb_s: 0,"),
        ":8: levels[1].bandwidth_gb_s = 0 is too small",
    ),
    "matrix row missing": (
        broken(MATRIX, "  - [5, 6, 0]\n", ""),
        ":8: matrix.bandwidth_gb_s has 2 rows for 3 nodes; ",
    ),
    "matrix row short": (
        broken(MATRIX, "[41, 0, 6]", "[41, 0]"),
        ":9: matrix.bandwidth_gb_s[1] has 2 values for 3 nodes; ",
    ),
    "matrix cuts nodes off": (
        broken(MATRIX, "[41, 0, 6]", "[41, 0, 0]"),
        ":9: matrix.bandwidth_gb_s[1][2] = 0.0: a-1 cannot send to b-0; ",
    ),
    "matrix with a gap": (
        broken(MATRIX, "[10, 0, 30]", "[10, 0, null]"),
        ":13: matrix.latency_us[1][2] = None: a-1 cannot send to b-0; ",
    ),
    "matrix without a node": (
        broken(MATRIX, "[a-0, a-1, b-0]", "[a-0, a-1]"),
        ":6: matrix.nodes leave b-0 out; ",
    ),
    "matrix with a stranger": (
        broken(MATRIX, "[a-0, a-1, b-0]", "[a-0, a-1, c-0]"),
        ":6: matrix.nodes[2] = 'c-0' is no node; ",
    ),
    "matrix with a node twice": (
        broken(MATRIX, "[a-0, a-1, b-0]", "[a-0, a-0, b-0]"),
        ":6: matrix.nodes[1] = a-0 has a row already; ",
    ),
    "matrix with a range": (
        broken(MATRIX, "[a-0, a-1, b-0]", "[a-0..1, b-0]"),
        ":6: matrix.nodes[0] = a-0..1 names 2 nodes; ",
    ),
    "matrix and network": (
        MATRIX + "network: {bandwidth_gb_s: 25}\n",
        ":15: network stands beside a measured matrix; ",
    ),
    "card without a rate": (
        broken(FABRICS, "gbit_s: 400, ", ""),
        ":3: nodes[0].network has neither gbit_s nor bandwidth_gb_s; give the line rate (gbit_s: 400)",
    ),
    "card with two rates": (
        broken(FABRICS, "gbit_s: 400", "gbit_s: 400, bandwidth_gb_s: 48"),
        ":3: nodes[0].network has both gbit_s and bandwidth_gb_s; ",
    ),
    "cards that cannot be shared evenly": (
        broken(FABRICS, "cards: 8", "cards: 3"),
        ":3: nodes[0].network.cards = 3 cannot be shared evenly by the node's 8 GPUs; write 1, 2, 4, 8 or a",
    ),
    "more cards than can be shared evenly": (
        broken(FABRICS, "cards: 8", "cards: 12"),
        "network.cards = 12 cannot be shared evenly",
    ),
    "no card": (broken(FABRICS, "cards: 8", "cards: 0"), ":3: nodes[0].network.cards = 0 is too small"),
    "node without a network": (
        broken(FABRICS, ", network: {gbit_s: 100, fabric: roce}", ""),
        ":4: nodes[1].network is missing: nothing says how l reaches other nodes; add it: {cards: …, gbit_s",
    ),
    "fabrics that do not meet": (
        FABRICS.partition("fabrics:")[0],
        "fabrics is missing: nodes in infiniband and roce cannot reach each other; add how they meet: [{meet",
    ),
    "fabrics of which one is left": (
        broken(FABRICS, "fabrics:", "- {name: e, gpu: T4-16GB, gpus: 1, network: {gbit_s: 1}}\nfabrics:"),
        ":7: fabrics leave nodes apart: nodes in infiniband and network cannot reach each other; add how",
    ),
    "unknown fabric": (
        broken(FABRICS, "[infiniband, roce]", "[infiniband, ethernet]"),
        ":6: fabrics[0].meet[1] = 'ethernet' is no node's fabric; nodes have infiniband, roce",
    ),
    "fabrics joined again": (
        FABRICS + "- {gbit_s: 10}\n",
        ":7: fabrics[1] joins fabrics that an earlier entry joined; remove it",
    ),
    "fabrics of one": (
        broken(FABRICS, "fabric: roce", "fabric: infiniband").replace("meet: [infiniband, roce], ", ""),
        "fabrics join nothing: all nodes are in one fabric; remove them",
    ),
    "a network without a rate": (
        broken(GOOD, "bandwidth_gb_s: 25, ", ""),
        ": network has neither gbit_s nor bandwidth_gb_s; give the line rate (gbit_s: 400)",
    ),
    "a network with two rates": (
        broken(GOOD, "bandwidth_gb_s: 25", "gbit_s: 200, bandwidth_gb_s: 25"),
        ": network has both gbit_s and bandwidth_gb_s; ",
    ),
    "a level without a rate": (
        broken(LEVELS, ", bandwidth_gb_s: 100", ""),
        ": levels[0] has neither gbit_s nor bandwidth_gb_s; ",
    ),
    "fabrics without a rate": (broken(FABRICS, "gbit_s: 100, per", "per"), ":6: fabrics[0] has neither"),
    "fabrics and levels": (
        FABRICS + "levels: [{name: rack, groups: [[h, l]], bandwidth_gb_s: 9}]\n",
        "levels stand beside several fabrics (infiniband, roce); describe fabrics as the first level",
    ),
    "matrix and cards": (
        broken(MATRIX, "gpus: 2}", "gpus: 2, network: {gbit_s: 1}}"),
        ":3: nodes[0].network stands beside a measured matrix; ",
    ),
    "no list of hosts": (
        broken(LEVELS, "count: 4", "hosts: 'h[01-'"),
        ":3: nodes[0].hosts = 'h[01-' is no list of hosts; write it as Slurm does: h[01-06], or h01,h02",
    ),
    "host twice": (
        broken(LEVELS, "count: 4", "hosts: 'h[1-4]'").replace("{name: b,", "{name: b, hosts: h2,"),
        ":4: nodes[1].hosts = 'h2' names h2 again, which nodes[0] has; name each host once",
    ),
    "hosts and count": (
        broken(LEVELS, "count: 4", "count: 3, hosts: 'h[1-4]'"),
        ":3: nodes[0].hosts = 'h[1-4]' names 4 hosts for count: 3; leave count out, or correct",
    ),
    "curve without source": (
        GOOD + broken(DEVICE, ", source: probe", ""),
        ":9: devices.H100-SXM-80GB.matmul has neither source nor estimate; ",
    ),
    "curve downhill": (
        GOOD + broken(DEVICE, "[4096", "[512"),
        ":9: devices.H100-SXM-80GB.matmul.points[1] has size 512 after 1024; ",
    ),
    "curve of zero": (
        GOOD + broken(DEVICE, "700", "0"),
        "devices.H100-SXM-80GB.matmul.points[1][1] = 0 is too small",
    ),
    "curve without points": (
        GOOD + broken(DEVICE, "[[1024, 500], [4096, 700]]", "[]"),
        "matmul.points = [] is empty",
    ),
    "new gpu half described": (
        GOOD + broken(DEVICE, "H100-SXM-80GB", "MI300X"),
        "devices.MI300X.memory_gb is missing; add it: the catalogue",
    ),
    "empty file": ("", ":1: is empty; a cluster file is a mapping with name, nodes and network"),
    "only a list": ("- 1\n", ":1: holds [1]; a cluster file is a mapping with name, nodes and network"),
    "bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nname: x\n", ":2: alias *a is not allowed here"),
    "no yaml": ("name: [1,\n", "not valid YAML"),
    "key twice": (GOOD + "name: again\n", ":6: name is given twice"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_one_clear_line(write, what):
    text, wanted = BROKEN[what]
    path = write(text)
    with pytest.raises(HexiError) as caught:
        read_cluster(path)
    message = str(caught.value)
    assert wanted in message
    assert message.startswith(f"{path}:")
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_rules_of_clusters_are_cluster_errors(write):
    with pytest.raises(ClusterError):
        read_cluster(write(BROKEN["name twice"][0]))


def test_no_two_broken_files_say_the_same(write):
    said = set()
    for text, _ in BROKEN.values():
        with pytest.raises(HexiError) as caught:
            read_cluster(write(text))
        said.add(str(caught.value))
    assert len(said) == len(BROKEN)


def test_an_absent_file():
    with pytest.raises(HexiError, match="cannot be read"):
        read_cluster("absent.yaml")
