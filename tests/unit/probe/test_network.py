"""From a measurement to a cluster file that the planner reads, and what an interrupted probe leaves."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from megatron_hexi.cluster import catalog, read_cluster
from megatron_hexi.cost.compute import device_speeds, head_size_factor
from megatron_hexi.cost.moved_bytes import HBM_SHARE
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, read_model
from megatron_hexi.probe.assemble import assemble
from megatron_hexi.probe.document import (
    Between,
    Inside,
    Options,
    load_partial,
    measurement_from_json,
    save_partial,
)
from megatron_hexi.probe.network import write_cluster
from tests.support.probes import GPU, measurement, rank_of, transfer

H100 = {"kind": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "memory_bytes": 79 * 2**30, "capability": (9, 0)}


def written(tmp_path, measured):
    """The cluster that the file describes, and the notes."""
    data, notes = assemble(measured, "my cluster")
    cluster, notes = write_cluster(tmp_path / "out.yaml", data, notes, measured)
    assert read_cluster(tmp_path / "out.yaml") == cluster
    return cluster, notes


def four_ranks(**fields):
    """Two nodes of two ranks, with links of 2 GB/s inside and 0.5 between."""
    ranks = [rank_of(host=host, local_rank=local) for host in ("a", "b") for local in (0, 1)]
    inside = tuple(Inside(n, transfer(2), transfer(2), transfer(2), 20e-6) for n in (0, 1))
    between = tuple(
        Between(a, b, transfer(0.5), transfer(0.5), 50e-6) for a, b in itertools.permutations((0, 1))
    )
    usual = {"inside": inside, "between": between, "together": transfer(0.5 / 4)}
    return measurement(ranks, [0.1, 0.1, 0.05, 0.05], **usual | fields)


def test_an_unknown_device_is_written_in_full(tmp_path):
    cluster, notes = written(tmp_path, four_ranks())
    fast, slow = cluster.nodes
    device = fast.device
    assert (cluster.name, fast.name, slow.name) == ("my-cluster", "a-0", "b-0")
    assert device.name == f"CPU-{GPU.replace(' ', '-')}"
    assert [device.matmul.rate(size) for size in (256, 1024, 4096)] == pytest.approx([0.1, 0.2, 0.3])
    assert [slow.device.matmul.rate(size) for size in (256, 1024)] == pytest.approx([0.05, 0.1])
    for curve in device.attention("aten-cpu").curves.values():
        assert curve.rate(1024) == pytest.approx(0.2)
        assert not curve.estimate
        assert "measured 2026-05-04, fp32, torch 1.2.3, hexi probe" in curve.source
    assert (device.memory_gb, device.usable_gib) == (8, 6)
    assert device.nominal.fp32 == pytest.approx(0.3)
    assert device.nominal.bf16 is None
    assert fast.bandwidth == pytest.approx(2e9)
    assert cluster.bandwidth(0, 2) == pytest.approx(0.5e9)
    assert cluster.file.network is not None
    assert cluster.file.network.per == "node"
    assert any("b runs at 0.5" in note for note in notes)


def test_hosts_are_written_so_that_slurm_can_be_asked_for_them(tmp_path):
    cluster, _ = written(tmp_path, four_ranks())
    assert cluster.file.hosts == ("a", "b")


def test_cards_of_each_node_are_written_and_read(tmp_path):
    """A third node with a thinner card: every pair is told by the nodes' own networks, without a matrix."""
    ranks = [rank_of(host=host, local_rank=local) for host in "abc" for local in (0, 1)]
    way = [4.0, 4.0, 0.5]
    between = tuple(
        Between(
            a,
            b,
            transfer(min(way[a], way[b])),
            transfer(min(way[a], way[b]) / (1 if 2 in (a, b) else 2)),
            5e-5,
        )
        for a, b in itertools.permutations(range(3), 2)
    )
    inside = tuple(Inside(n, transfer(9), transfer(9), transfer(9), 20e-6) for n in range(3))
    measured = measurement(ranks, [0.1] * 6, inside=inside, between=between, together=transfer(0.5 / 8))
    cluster, notes = written(tmp_path, measured)
    assert cluster.file.matrix is None
    assert cluster.file.network is None
    assert [node.cards.count for node in cluster.nodes] == [2, 2, 1]
    assert [cluster.bandwidth(0, dst) for dst in (2, 3, 4)] == pytest.approx([2e9, 2e9, 0.5e9], rel=1e-3)
    assert any(note.startswith("all nodes at once take 1.00 times") for note in notes)


def test_the_cost_model_arrives_at_the_memory_bandwidth_that_was_measured(tmp_path):
    cluster, _ = written(tmp_path, four_ranks())
    job = Job(model=read_model("gpt-3b"), seq_length=4096, precision="fp32")
    assert device_speeds(cluster.nodes[0].device, job).memory == pytest.approx(90e9, rel=1e-3)
    assert cluster.nodes[0].device.memory_gb_s == pytest.approx(90 / HBM_SHARE, rel=1e-3)


def test_curves_of_other_heads_come_back_to_what_was_measured(tmp_path):
    measured = dataclasses.replace(four_ranks(), options=Options(precision="fp32", head_dim=64))
    cluster, _ = written(tmp_path, measured)
    curve = cluster.nodes[0].device.attention("aten-cpu").full.forward
    assert curve.rate(1024) * head_size_factor(64) == pytest.approx(0.2, rel=1e-3)
    assert "heads of 64" in curve.source


def test_of_a_known_gpu_only_what_was_measured_is_written(tmp_path):
    rank = rank_of(**H100, kernels=("aten-flash",))
    measured = measurement([rank], [100.0], options=Options())
    cluster, _ = written(tmp_path, measured)
    found, known = cluster.nodes[0].device, catalog()["H100-SXM-80GB"]
    assert cluster.file.devices.keys() == {"H100-SXM-80GB"}
    assert found.nominal == known.nominal
    assert found.link == known.link
    assert found.usable_gib == 6
    assert found.attention("aten-flash").causal.forward.rate(1024) == pytest.approx(200)
    assert "aten-flash" in found.attention("flash-attn-2").causal.forward.source
    assert found.attention("cudnn") == known.attention("cudnn")


def test_a_known_gpu_in_fp32_is_a_device_of_its_own(tmp_path):
    measured = measurement([rank_of(**H100)], [10.0])
    cluster, _ = written(tmp_path, measured)
    device = cluster.nodes[0].device
    assert device.name == "H100-SXM-80GB-fp32"
    job = Job(model=read_model("gpt-3b"), seq_length=4096, precision="fp32")
    assert device.matmul.rate(1024) == pytest.approx(20)
    # Memory at 100 GB/s: a part of that time is writing.
    assert device_speeds(device, job).matmul.rate(1024) > 20


def test_less_memory_on_a_node_is_written(tmp_path):
    measured = four_ranks(usable_bytes=(6 * 2**30, 6 * 2**30, 3 * 2**30, 2 * 2**30))
    cluster, _ = written(tmp_path, measured)
    assert [node.device.usable_gib for node in cluster.nodes] == pytest.approx([6, 2], rel=1e-3)


def test_host_memory_is_the_nodes_and_its_slowest_rank_says_how_fast(tmp_path):
    free = (10 * 2**30, 30 * 2**30, 20 * 2**30, 20 * 2**30)
    measured = four_ranks(
        host_bytes=free, host_gb_s=(9.0, 6.0, 12.0, None), host_stream_gb_s=(40.0, 30.0, 40.0, 40.0)
    )
    cluster, _ = written(tmp_path, measured)
    host = cluster.nodes[0].device.host
    assert (host.usable_gib, host.bandwidth_gb_s, host.memory_gb_s) == pytest.approx(
        (0.8 * 40 / 2, 6.0, 30.0)
    )
    assert cluster.nodes[1].device.host is None  # there was no room to measure it


def test_a_shared_bottleneck_shows_when_all_send_at_once(tmp_path):
    _, notes = written(tmp_path, four_ranks(together=transfer(0.5 / 8)))
    (note,) = [note for note in notes if note.startswith("all nodes at once")]
    assert "they share a link" in note
    assert f"# {note}" in (tmp_path / "out.yaml").read_text()


def test_other_software_on_a_node_is_named(tmp_path):
    measured = four_ranks()
    ranks = [*measured.ranks[:3], dataclasses.replace(measured.ranks[3], versions={"torch": "9"})]
    _, notes = written(tmp_path, dataclasses.replace(measured, ranks=tuple(ranks)))
    assert "b has other kernels or versions than a: install the same on both" in notes


def test_a_device_of_which_nothing_was_measured_is_refused(tmp_path):
    measured = four_ranks()
    curves = {name: series for name, series in measured.curves.items() if name != "aten-cpu full backward"}
    with pytest.raises(HexiError, match="aten-cpu full backward was measured at no size"):
        assemble(dataclasses.replace(measured, curves=curves), "c")


def test_nothing_is_put_in_place_of_a_file_that_is_wrong(tmp_path):
    (tmp_path / "out.yaml").write_text("as it was")
    measured = four_ranks()
    data, notes = assemble(measured, "c")
    data["nodes"][0]["gpus"] = 0
    with pytest.raises(HexiError):
        write_cluster(tmp_path / "out.yaml", data, notes, measured)
    assert [path.name for path in tmp_path.iterdir()] == ["out.yaml"]
    assert (tmp_path / "out.yaml").read_text() == "as it was"


def test_a_measurement_survives_json():
    measured = four_ranks()
    assert measurement_from_json(json.dumps(measured.as_dict())) == measured


def test_a_kept_measurement_is_taken_up(tmp_path):
    path, measured = tmp_path / "p.json", dataclasses.replace(four_ranks(), done=("memory",))
    fresh = dataclasses.replace(measured, done=(), curves={}, started="2026-05-05")
    assert load_partial(path, fresh) is fresh
    save_partial(path, measured)
    assert load_partial(path, fresh) == measured


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hexi": "9.9"}, "megatron-hexi '0.1.0', this is '9.9'"),
        ({"options": Options(precision="fp16")}, "precision 'fp32', this is 'fp16'"),
        ({"ranks": (rank_of(),)}, "ranks 4, this is 1"),
        (
            {
                "ranks": tuple(
                    rank_of(host=h, local_rank=r) for h, r in (("a", 0), ("a", 1), ("b", 0), ("c", 0))
                )
            },
            "rank 3's host 'b', this is 'c'",
        ),
    ],
)
def test_a_kept_measurement_of_something_else_is_refused(tmp_path, change, said):
    path, measured = tmp_path / "p.json", four_ranks()
    save_partial(path, measured)
    with pytest.raises(HexiError, match=said) as refusal:
        load_partial(path, dataclasses.replace(measured, **change))
    assert "--restart" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', "[]", '{"version": 1, "started": "x"}'])
def test_what_is_no_measurement_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(HexiError, match="is no measurement of this version") as refusal:
        load_partial(path, four_ranks())
    assert "--restart" in str(refusal.value)
