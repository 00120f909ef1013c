"""The testbed's rules and sums, without a lab: what is refused, what is charged, what is called true."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from megatron_hexi.cluster import Curve, cluster_from_yaml, read_cluster
from megatron_hexi.cost import compute
from megatron_hexi.errors import ClusterError, PlatformError
from megatron_hexi.lab.testbed import quotas, truth
from megatron_hexi.lab.testbed.command import check_emulable
from megatron_hexi.lab.testbed.in_rank import load
from megatron_hexi.lab.testbed.in_rank.charge import Charger, PacedClock, Pacing
from megatron_hexi.lab.testbed.lab import Lab, Quota
from megatron_hexi.lab.testbed.network import LinkMeasured
from megatron_hexi.lab.testbed.quotas import cycle_seconds
from megatron_hexi.models import Job, Model
from megatron_hexi.yaml_file import read_yaml
from tests.support.shell import call_hexi, is_one_error_line
from tests.support.testbed import pair

EXAMPLES = sorted((Path(__file__).parents[3] / "scripts" / "testbed").glob("*.yaml"))


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "pair.yaml"
    path.write_text(pair(gpus=2))
    return read_cluster(path)


class Recorder(PacedClock):
    """What would have been waited for."""

    def __init__(self):
        super().__init__()
        self.charges = []

    def begin(self):
        return 0.0

    def end(self, begin, kind, seconds):
        self.charges.append((kind, seconds))


def charges_of(device, work):
    recorder = Recorder()
    with Pacing(Charger(device), recorder):
        work()
    return recorder.charges


def with_curves(device, matmul, attention):
    curve = Curve((1.0, 4096.0), attention, "chosen")
    return replace(
        device,
        matmul=Curve((1.0, 4096.0), matmul, "chosen"),
        attentions=(device.attentions[0].map(lambda _: curve),),
    )


# What is refused


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_emulated(path):
    source = read_yaml(path)
    check_emulable(cluster_from_yaml(source), source, "quota", links=True)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("per: node", "per: gpu", ":5: network.per = gpu cannot be emulated"),
        (
            "devices:",
            "levels:\n- {name: rack, groups: [[fast], [slow]], bandwidth_gb_s: 1}\ndevices:",
            "levels",
        ),
        (
            "bandwidth_gb_s: 0.0125",
            "bandwidth_gb_s: 0.5",
            ":3: nodes[0] has 0.125 GB/s inside and 0.5 outside",
        ),
        ("aten-cpu", "flash-attn-2", ":3: nodes[0].gpu = core has no curves of aten-cpu"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_its_line(tmp_path, old, new, said):
    path = tmp_path / "cluster.yaml"
    path.write_text(pair(gpus=2).replace(old, new))
    source = read_yaml(path)
    with pytest.raises(ClusterError) as refused:
        check_emulable(cluster_from_yaml(source), source, "paced", links=True)
    assert said in str(refused.value)


def test_without_links_none_of_the_files_links_matter(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(pair(gpus=2).replace("per: node", "per: gpu"))
    source = read_yaml(path)
    check_emulable(cluster_from_yaml(source), source, "paced", links=False)


def test_a_quota_refuses_devices_whose_ratio_depends_on_the_work(tmp_path):
    path = tmp_path / "cluster.yaml"
    other = (
        pair()
        .split("devices:\n")[1]
        .replace("core:", "odd:")
        .replace("matmul: {points: [[1, 0.02", "matmul: {points: [[1, 0.03")
    )
    path.write_text((pair() + other).replace("name: slow, gpu: core", "name: slow, gpu: odd"))
    source = read_yaml(path)
    with pytest.raises(ClusterError, match=r"nodes\[1\] is 0.5 to 0.75 times as fast as core"):
        check_emulable(cluster_from_yaml(source), source, "quota", links=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "pair.yaml", "--speeds", "slow"], "--speeds slow"),
        (["check", "pair.yaml", "--emulate-links", "thin"], "--emulate-links thin"),
        (["check", "pair.yaml", "--gpus", "1,1"], "--gpus 1,1"),
        (["check", "pair.yaml", "--gpus", "0,7"], "--gpus 0,7"),
        (["check", "absent.yaml"], "absent.yaml"),
        (["check", "pair.yaml", "--out", "full"], "holds files already"),
        (["run", "pair.yaml"], "MODULE|SCRIPT"),
        (["run", "pair.yaml", "--", "absent.py"], "absent.py: no such script"),
        (["run", "pair.yaml", "--", "-m"], "-m: no module follows it"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("pair.yaml").write_text(pair())
    Path("full").mkdir()
    Path("full/file").touch()
    result = call_hexi(monkeypatch, capsys, ["testbed", *words])
    assert result.code == 2
    assert said in result.err
    assert is_one_error_line(result.err)


def test_the_command_needs_no_torch():
    modules = "megatron_hexi.cli.testbed, megatron_hexi.lab.testbed.supervisor"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# What is charged


@pytest.mark.parametrize("tokens", [3, 64, 512])
def test_a_linear_layer_runs_at_the_rate_of_its_tokens_in_both_passes(cluster, tokens):
    device = with_curves(cluster.ranks[0].device, (0.001, 0.1), (1.0, 1.0))
    rows = torch.randn(tokens, 96, requires_grad=True)
    weight, bias = torch.randn(160, 96, requires_grad=True), torch.randn(160, requires_grad=True)

    def work():
        linear(rows, weight, bias).pow(2).sum().backward()

    seconds = 2 * tokens * 96 * 160 / (device.matmul.rate(tokens) * 1e12)
    assert charges_of(device, work) == [("matmul", pytest.approx(seconds))] * 3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_attention_is_charged_as_the_cost_model_counts(cluster, causal, head_dim):
    device = with_curves(cluster.ranks[0].device, (1.0, 1.0), (0.001, 0.1))
    model = Model("m", 1, 4 * head_dim, 4, 4, head_dim, 64, False, 128, True)
    job = Job(model=model, seq_length=256, precision="fp32", global_batch_size=1)
    speeds = compute.device_speeds(device, job)
    expected = compute.own_block_times(speeds, job, np.array(256.0), causal)
    query = torch.randn(1, 4, 256, head_dim, requires_grad=True)
    key = torch.randn(1, 4, 256, head_dim)

    def work():
        scaled_dot_product_attention(query, key, key, is_causal=causal).sum().backward()

    assert charges_of(device, work) == [
        ("attention", pytest.approx(4 * float(expected.forward))),
        ("attention", pytest.approx(4 * float(expected.backward))),
    ]


def test_a_rectangle_is_charged_at_the_square_of_its_area(cluster):
    device = with_curves(cluster.ranks[0].device, (1.0, 1.0), (0.001, 0.1))
    query, key = torch.randn(1, 2, 16, 128), torch.randn(1, 2, 256, 128)
    [(_, seconds)] = charges_of(device, lambda: scaled_dot_product_attention(query, key, key))
    rate = device.attentions[0].full.forward.rate(64) * 1e12
    assert seconds == pytest.approx(4 * 2 * 128 * 16 * 256 / rate)


def test_fp32_is_slower_by_the_nominal_rates(cluster):
    device = cluster.ranks[0].device
    halved = replace(device, nominal=replace(device.nominal, bf16=0.04))
    rows = torch.randn(8, 8)
    [(_, at_par)], [(_, slow)] = (charges_of(d, lambda: rows @ rows) for d in (device, halved))
    assert slow == pytest.approx(2 * at_par)


def test_elementwise_work_is_free(cluster):
    rows = torch.randn(8, 8)
    assert charges_of(cluster.ranks[0].device, lambda: (rows * rows + 1).softmax(-1)) == []


def test_the_load_is_charged_for_what_a_cycle_is_said_to_take(cluster):
    device = with_curves(cluster.ranks[0].device, (0.001, 0.1), (0.002, 0.05))
    tensors = load._tensors()
    charged = charges_of(device, lambda: load._cycle(*tensors))
    assert sum(seconds for _, seconds in charged) == pytest.approx(cycle_seconds(device))


# The clock


class Time:
    """A machine whose time passes only where a test lets it."""

    def __init__(self, monkeypatch):
        self.now = self.busy = 0.0
        self.slept = []
        time = SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr("megatron_hexi.lab.testbed.in_rank.charge.time", time)
        monkeypatch.setattr(PacedClock, "_busy", lambda clock: self.busy)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def compute(self, seconds):
        self.now += seconds
        self.busy += seconds


@pytest.fixture
def machine(monkeypatch):
    return Time(monkeypatch)


def paced(clock, machine, computes, modelled):
    begin = clock.begin()
    machine.compute(computes)
    clock.end(begin, "matmul", modelled)


def test_an_operation_takes_its_modelled_time(machine):
    clock = PacedClock()
    paced(clock, machine, 0.2, 1.0)
    assert machine.now == pytest.approx(1.0)
    assert machine.slept == [pytest.approx(0.8)]


def test_work_between_is_taken_up_by_the_next_operations(machine):
    clock = PacedClock()
    paced(clock, machine, 0.2, 1.0)
    machine.compute(0.5)  # element-wise work
    paced(clock, machine, 0.2, 1.0)
    assert machine.now == pytest.approx(2.0)


def test_waiting_for_another_rank_is_not_made_up_for(machine):
    clock = PacedClock()
    paced(clock, machine, 0.2, 1.0)
    machine.now += 3.0  # a receive: no processor time
    paced(clock, machine, 0.2, 1.0)
    assert machine.now == pytest.approx(5.0)
    assert clock.finish().lost == 0


def test_an_operation_without_head_room_is_counted(machine):
    clock = PacedClock()
    paced(clock, machine, 1.5, 1.0)
    pace = clock.finish()
    assert pace.excess == pytest.approx(0.5)
    assert pace.lost == pytest.approx(0.5)


def test_long_lateness_is_given_up_and_counted(machine):
    clock = PacedClock()
    paced(clock, machine, 0.1, 1.0)
    machine.compute(10.0)  # a checkpoint
    paced(clock, machine, 0.1, 1.0)
    paced(clock, machine, 0.1, 1.0)
    assert machine.now == pytest.approx(1.0 + 10.0 + 0.1 + 1.0)
    assert clock.finish().lost == pytest.approx(9.1)


def test_unmodelled_work_before_a_message_is_reported_once(machine):
    clock = PacedClock()
    paced(clock, machine, 0.1, 1.0)
    machine.compute(0.25)
    clock.message()
    clock.message()
    assert clock.finish().exposed == pytest.approx(0.25)


# Quotas


def test_shares_are_in_proportion_and_leave_room_on_every_core(cluster):
    shares = quotas.assign_shares(cluster, [0, 1])
    assert [share for _, share in shares] == pytest.approx([0.85 * 2 / 3] * 2 + [0.85 / 3] * 2)
    for core in (0, 1):
        assert sum(share for at, share in shares if at == core) == pytest.approx(0.85)


def test_a_share_below_what_the_kernel_grants_is_refused(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(pair().replace("speed: 0.5", "speed: 0.05"))
    with pytest.raises(PlatformError, match="the kernel grants 10%"):
        quotas.assign_shares(read_cluster(path), [0])


def test_quotas_are_corrected_by_the_speeds_that_were_measured(tmp_path):
    shares = [0.5, 0.5, 0.25, 0.25]
    old = [Quota(str(tmp_path / str(gpu)), gpu % 2, share) for gpu, share in enumerate(shares)]
    for quota in old:
        Path(quota.cgroup).mkdir()
    found = quotas.correct_shares(old, {0: 1.0, 1: 1.0, 2: 0.8, 3: 1.0})
    # The third is worth a fifth less than its share: it gets a quarter more, and no core more than 0.85.
    assert found[2].share / found[0].share == pytest.approx(0.25 / 0.8 / 0.5)
    assert found[3].share / found[1].share == pytest.approx(0.5)
    assert found[0].share + found[2].share == pytest.approx(0.85)
    assert [quota.core for quota in found] == [0, 1, 0, 1]
    for quota in found:
        limits = [int(word) for file in Path(quota.cgroup).iterdir() for word in file.read_text().split()]
        assert sorted(limits) == sorted([round(10_000 * quota.share), 10_000])


def test_the_guard_removes_groups_when_its_pipe_closes(tmp_path):
    root = tmp_path / "group"
    (root / "rank-0").mkdir(parents=True)
    guard = subprocess.Popen(
        [sys.executable, "-m", "megatron_hexi.lab.testbed.guard", str(root)], stdin=subprocess.PIPE
    )
    assert guard.poll() is None
    assert root.exists()
    guard.communicate(timeout=30)
    assert not root.exists()


# Truth


def test_what_is_off_by_more_than_five_per_cent_is_a_problem(cluster):
    def link(measured):
        return LinkMeasured(0, 2, "network", 0.0125, measured, 20, 10)

    assert truth.link_problems(cluster, [link(0.0125 * 0.96)]) == []
    [problem] = truth.link_problems(cluster, [link(0.0125 * 0.94)])
    assert "fast-0/0 to slow-0/0: asked 0.0125 GB/s, measured 0.01175 (-6.0%)" in problem
    assert truth.speed_problems(cluster, [truth.SpeedMeasured(0, 1.0, 1.04)], "paced") == []
    [problem] = truth.speed_problems(cluster, [truth.SpeedMeasured(3, 1.0, 1.1)], "paced")
    assert "GPU 3 (slow-0/1)" in problem


def test_overruns_and_lost_time_of_a_job_are_problems(cluster, tmp_path):
    lab = Lab(tmp_path, "paced", True, "root", (1,), (), ())
    good = {"operations": 9, "modelled": {"matmul": 10.0}, "computing": 2.0, "excess": 0.1, "lost": 0.1}
    good |= {"between": 1.0, "exposed": 0.5, "wall": 20.0}
    assert truth.pace_problems(cluster, truth.read_pace(lab, [{"pace": good}])) == []
    for bad in ({"excess": 0.6}, {"lost": 0.6}):
        [problem] = truth.pace_problems(cluster, truth.read_pace(lab, [{"pace": good | bad}]))
        assert "GPU 1 (fast-0/1)" in problem


def test_a_quotas_speeds_are_judged_by_their_ratios(cluster, tmp_path):
    lab = Lab(tmp_path, "quota", False, "root", (0, 1, 2, 3), (), ())
    for rank, cycles in enumerate((20, 20, 10, 10)):
        lab.log("load", rank).write_text(f'warning\n{{"cycles": {cycles}, "seconds": 4.0}}\n')
    assert [speed.error for speed in truth.read_speeds(lab, cluster, "load")] == pytest.approx([0] * 4)
