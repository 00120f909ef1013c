"""`hexi place`: which of a Slurm job's hosts are which of the cluster file's nodes."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given

from megatron_hexi.cluster import cluster_digest
from megatron_hexi.errors import ClusterError, PlanError, PlatformError
from megatron_hexi.plan import Provenance, Workload, proportional_plan, write_plan
from megatron_hexi.slurm import allocated_hosts, parse_nodes, place
from tests.support.fleets import read_text
from tests.support.plans import RANDOMS, examples
from tests.support.shell import call_hexi, is_one_error_line

#: What sinfo says of a cluster with two kinds of nodes.
SINFO = """\
h1|h100|nvlink,h100|gpu:8
h1|all|nvlink,h100|gpu:8
h2|h100|nvlink,h100|gpu:8
h2|all|nvlink,h100|gpu:8
a1|a100|nvlink,a100|gpu:8
a1|all|nvlink,a100|gpu:8
a2|a100|nvlink,a100|gpu:8
a2|all|nvlink,a100|gpu:8
"""
NODES = parse_nodes(SINFO)


def cluster(*entries: str, per_node: int = 8):
    """A cluster file's: its entries are ``name gpu count``."""
    words = [entry.split() for entry in entries]
    lines = [
        f"- {{name: {name}, gpu: {gpu}, count: {count}, gpus: {per_node}}}" for name, gpu, count in words
    ]
    return read_text(
        "name: ours\nnodes:\n" + "\n".join(lines) + "\nnetwork: {bandwidth_gb_s: 25, latency_us: 5}\n"
    )


def plan_for(ranks, gpus=None):
    workload = Workload(seq_length=64 * ranks, heads=8, kv_heads=8, head_dim=16)
    return dataclasses.replace(proportional_plan(workload, [[[1.0]] * ranks]), gpus=gpus)


H100, A100 = "H100-SXM-80GB", "A100-SXM-80GB"


def test_hosts_of_the_probe_are_found_by_name_in_any_order():
    machines = cluster(f"h2 {H100} 1", f"a1 {A100} 1")
    for hosts in (["a1", "h2"], ["h2", "a1"]):
        assert place(plan_for(16), machines, NODES, hosts).hosts == ("h2",) * 8 + ("a1",) * 8


def test_another_host_that_slurm_describes_alike_stands_in():
    placed = place(plan_for(16), cluster(f"h2 {H100} 1", f"a1 {A100} 1"), NODES, ["a2", "h2"])
    assert placed.nodes == {"h2-0": "h2", "a1-0": "a2"}


@pytest.mark.parametrize("names", [("h100", "a100"), ("h100", "all")])
def test_entries_are_found_by_feature_or_partition(names):
    """Where the names overlap, the one with less choice comes first."""
    kinds = [f"{names[1]} {A100} 1", f"{names[0]} {H100} 1"]
    placed = place(plan_for(16), cluster(*kinds), NODES, ["h1", "a2"])
    assert placed.nodes == {f"{names[1]}-0": "a2", f"{names[0]}-0": "h1"}


def test_nodes_that_the_plan_leaves_out_need_no_host():
    machines = cluster(f"h100 {H100} 2", f"a100 {A100} 2")
    placed = place(plan_for(3, gpus=(25, 9, 24)), machines, NODES, ["h1", "a2", "a1"])
    assert placed.hosts == ("a2", "h1", "a2")
    assert placed.idle == ("a1",)


@given(RANDOMS)
@examples(100)
def test_every_rank_is_on_a_host_of_its_node_s_kind(random: Random):
    """Hosts in random order; entries named by feature, or by a host that may be missing."""
    kinds = {kind: random.randint(1, 4) for kind in ("big", "mid", "small")}
    known = parse_nodes(
        "".join(f"{kind}{n}|all|{kind}|gpu:4\n" for kind, count in kinds.items() for n in range(2 * count))
    )
    by_host = random.random() < 0.5
    entries = [
        f"{kind}{number} {H100} 1" if by_host else f"{kind} {H100} {count}"
        for kind, count in kinds.items()
        for number in (range(count) if by_host else [None])
    ]
    machines = cluster(*random.sample(entries, len(entries)), per_node=4)
    hosts = [
        host
        for kind, count in kinds.items()
        for host in random.sample([f"{kind}{n}" for n in range(2 * count)], count)
    ]
    random.shuffle(hosts)
    gpus = tuple(random.sample(range(len(machines.ranks)), random.randint(1, len(machines.ranks))))
    placed = place(plan_for(len(gpus), gpus), machines, known, hosts)
    assert set(placed.hosts) | set(placed.idle) == set(hosts)
    assert len(set(placed.nodes.values())) == len(placed.nodes)
    for gpu, host in zip(gpus, placed.hosts, strict=True):
        name = machines.nodes[machines.ranks[gpu].node].name
        assert placed.nodes[name] == host
        assert host.rstrip("0123456789") == name.rpartition("-")[0].rstrip("0123456789")
        if by_host and name.removesuffix("-0") in hosts:
            assert host == name.removesuffix("-0")
    assert max(Counter(placed.hosts).values()) <= 4


def test_a_plan_for_another_cluster_is_refused():
    machines = cluster(f"h100 {H100} 1")
    own = dataclasses.replace(plan_for(8), provenance=Provenance(cluster_digest=cluster_digest(machines)))
    assert place(own, machines, NODES, ["h1"]).hosts == ("h1",) * 8
    with pytest.raises(PlanError, match="is another; give the first one's file, or plan again"):
        place(own, cluster(f"a100 {A100} 1"), NODES, ["a1"])


@pytest.mark.parametrize("plan", [plan_for(16), plan_for(1, gpus=(8,)), plan_for(3)])
def test_a_plan_for_gpus_that_the_cluster_lacks_is_refused(plan):
    with pytest.raises(PlanError, match="cluster ours has 8 GPUs"):
        place(plan, cluster(f"h100 {H100} 1"), NODES, ["h1"])


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("h100", "with the feature, or in the partition, h100"),
        ("h2", r"for h2 \(--nodelist\), or one more like it"),
    ],
)
def test_a_job_without_a_host_for_a_node_is_refused(entry, wanted):
    with pytest.raises(PlatformError, match=f"the job has 2 hosts .a1, a2.*{wanted}"):
        place(plan_for(8), cluster(f"{entry} {H100} 1"), NODES, ["a1", "a2"])


def test_too_few_hosts_are_refused_with_what_is_missing():
    machines = cluster(f"h100 {H100} 2")
    with pytest.raises(PlatformError, match=r"needs 2 nodes \(h100-0, h100-1\), .* matches h100-1"):
        place(plan_for(16), machines, NODES, ["h1"])


def test_names_that_slurm_does_not_know_are_refused():
    with pytest.raises(ClusterError, match=r"no host, feature or partition b200, .*a100, all, h100, nvlink"):
        place(plan_for(8), cluster(f"b200 {H100} 1"), NODES, ["h1"])


def test_the_reported_site(job, monkeypatch, capsys):
    """Nodes called h100 and a100, which are neither features nor partitions."""
    nodes = "gpu01|gpu|(null)|gpu:h100:2(S:0-1)\ngpu02|gpu|(null)|gpu:a100:2(S:0-1)\n"
    monkeypatch.delenv("SLURM_HET_SIZE")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02]")
    monkeypatch.setattr("sys.stdin", io.StringIO(nodes))
    result = call_hexi(monkeypatch, capsys, WORDS)
    assert (result.code, result.out) == (0, "h100-0 is gpu01: 1 rank\na100-0 is gpu02: 2 ranks\n")


def test_hosts_that_the_file_names_are_the_nodes():
    """Whatever features say; another host that Slurm describes alike stands in where the job lacks one."""
    machines = read_text(
        f"name: ours\nnodes:\n- {{name: new, gpu: {H100}, gpus: 8, hosts: 'h[2,1]'}}\n"
        f"- {{name: h100, gpu: {A100}, gpus: 8, hosts: a1}}\nnetwork: {{bandwidth_gb_s: 25}}\n"
    )
    assert [node.name for node in machines.nodes] == ["new-0", "new-1", "h100-0"]
    placed = place(plan_for(24), machines, NODES, ["a2", "h1", "h2"])
    assert placed.nodes == {"new-0": "h2", "new-1": "h1", "h100-0": "a2"}
    assert placed.absent == {"a1": "a2"}


def test_a_host_that_slurm_does_not_know_is_not_replaced_by_its_kind_of_gpu(job, monkeypatch, capsys):
    """Nor by a host with the entry's feature: the file says which host it is."""
    text = (job / "cluster.yaml").read_text().replace("name: h100,", "name: h100, hosts: 'x01',")
    (job / "cluster.yaml").write_text(text)
    result = call_hexi(monkeypatch, capsys, WORDS)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert "plan.yaml on cluster.yaml: the cluster file names the host x01 for h100-0" in result.err
    assert not list(job.glob("hosts*"))


def test_a_host_that_stands_in_is_named(job, monkeypatch, capsys):
    text = (job / "cluster.yaml").read_text().replace("name: a100,", "name: a100, hosts: a1,")
    (job / "cluster.yaml").write_text(text)
    result = call_hexi(monkeypatch, capsys, WORDS)
    assert result.code == 0
    assert "note: a1 is not in this job; a2, which Slurm describes alike, stands in for it\n" in result.err


def test_nodes_of_two_kinds_that_slurm_describes_alike_are_not_guessed():
    known = parse_nodes("".join(f"n{number}|all|(null)|gpu:8\n" for number in range(4)))
    machines = cluster(f"n0 {H100} 1", f"n1 {A100} 1")
    assert place(plan_for(16), machines, known, ["n1", "n0"]).nodes == {"n0-0": "n0", "n1-0": "n1"}
    h100_alone = tuple(range(8))
    for hosts, plan in ((["n2", "n1"], plan_for(16)), (["n1"], plan_for(8, h100_alone))):
        with pytest.raises(PlatformError, match=rf"n0-0 and n1-0 alike, .*so {hosts[0]} may be either"):
            place(plan, machines, known, hosts)


def test_a_host_that_the_list_lacks_is_refused():
    with pytest.raises(PlatformError, match="the job's host x1 is missing in sinfo's output"):
        place(plan_for(8), cluster(f"h100 {H100} 1"), NODES, ["x1"])


@pytest.mark.parametrize("text", ["", "NODELIST\n", "h1|h100|nvlink\n", "|a|b|c\n"])
def test_what_sinfo_does_not_print_is_refused(text):
    with pytest.raises(PlatformError, match="sinfo --all --Node"):
        parse_nodes(text)


def test_components_of_a_job():
    plain = {"SLURM_JOB_NODELIST": "a[1-2],b1"}
    assert allocated_hosts(plain) == [["a1", "a2", "b1"]]
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(2)]
    mixed = plain | {"SLURM_HET_SIZE": "2", names[0]: "b1", names[1]: "a[1-2]"}
    assert allocated_hosts(mixed) == [["b1"], ["a1", "a2"]]
    for broken in ({}, {**mixed, names[1]: ""}):
        with pytest.raises(PlatformError, match="run this in the script of a Slurm job"):
            allocated_hosts(broken)


def test_hosts_that_the_plan_leaves_out_are_spares_where_the_cluster_file_has_them():
    machines = cluster(f"h100 {H100} 2", f"a100 {A100} 2")
    plan = plan_for(3, gpus=(25, 9, 24))
    placed = place(plan, machines, NODES, ["h1", "a2", "a1", "h2"], with_spares=True)
    assert placed.spares == {"h100-0": "h2", "a100-0": "a1"}
    assert placed.idle == ()
    placed = place(plan, machines, NODES, ["h1", "a2", "a1"], with_spares=True)
    assert (placed.spares, placed.idle) == ({"a100-0": "a1"}, ())
    few = cluster(f"h100 {H100} 1", f"a100 {A100} 1")
    placed = place(plan_for(16), few, NODES, ["h1", "a2", "a1"], with_spares=True)
    assert (placed.spares, placed.idle) == ({}, ("a1",))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A plan and its cluster file in a heterogeneous job of three hosts, of which the plan uses two."""
    (tmp_path / "cluster.yaml").write_text(
        f"name: ours\nnodes:\n- {{name: h100, gpu: {H100}, gpus: 2}}\n"
        f"- {{name: a100, gpu: {A100}, gpus: 2}}\n"
        "network: {bandwidth_gb_s: 25}\n"
    )
    write_plan(plan_for(3, gpus=(2, 0, 3)), tmp_path / "plan.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(SINFO))
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    for group, hosts in enumerate(("a2", "h1", "h2")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", hosts)
    return tmp_path


WORDS = ("place", "plan.yaml", "--cluster", "cluster.yaml", "-o", "hosts")


def test_the_command_writes_hosts_in_rank_order_and_by_component(job, monkeypatch, capsys):
    (job / "hosts.2").write_text("of an earlier start\n")
    result = call_hexi(monkeypatch, capsys, WORDS)
    assert (result.code, result.out) == (0, "h100-0 is h1: 1 rank\na100-0 is a2: 2 ranks\n")
    assert result.err == "note: without ranks by this plan: h2\nwrote hosts\n"
    files = {path.name: path.read_text() for path in job.glob("hosts*")}
    nodes = "h1 h100-0 2\na2 a100-0 2\n"
    assert files == {
        "hosts": "a2\nh1\na2\n",
        "hosts.0": "a2\na2\n",
        "hosts.1": "h1\n",
        "hosts.nodes": nodes,
    }


def test_spares_have_a_line_of_their_component_and_a_word_of_their_own(job, monkeypatch, capsys):
    text = (
        (job / "cluster.yaml")
        .read_text()
        .replace("network", f"- {{name: h2, gpu: {H100}, gpus: 2}}\nnetwork")
    )
    (job / "cluster.yaml").write_text(text)
    result = call_hexi(monkeypatch, capsys, [*WORDS, "--spares"])
    assert result.code == 0, result.err
    assert result.out.endswith("h2-0 is h2: a spare\n")
    assert (job / "hosts.2").read_text() == "h2\n"
    assert (job / "hosts.nodes").read_text() == "h1 h100-0 2\na2 a100-0 2\nh2 h2-0 2 spare\n"


def test_the_command_s_document(job, monkeypatch, capsys):
    result = call_hexi(monkeypatch, capsys, [*WORDS, "--json"])
    assert json.loads(result.out) == {
        "hosts": ["a2", "h1", "a2"],
        "nodes": {"h100-0": "h1", "a100-0": "a2"},
        "spares": {},
        "idle": ["h2"],
    }


def test_outside_a_job_the_command_writes_nothing(job, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_HET_SIZE")
    result = call_hexi(monkeypatch, capsys, WORDS)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert not list(job.glob("hosts*"))
