"""The testbed on this machine: nothing is left of it however it ends; pacing changes no number."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_hexi.lab.testbed.isolation import find_isolation
from megatron_hexi.plan import Workload, proportional_plan, write_plan
from tests.megatron.launch import TINY_GPT, environment
from tests.support.testbed import pair

pytestmark = pytest.mark.skipif(
    find_isolation() == "none", reason="neither root nor user namespaces: no namespace can be made"
)

#: Every rank has a process in a session of its own, and waits; one of them fails when it is told to.
JOB = """\
import os, subprocess, sys, time
subprocess.Popen(["sleep", "301"], start_new_session=True)
if os.environ["RANK"] == "1":
    while not os.path.exists("go"):
        time.sleep(0.1)
    {fail}
time.sleep(300)
"""

#: Holds quotas until it is killed.
HOLD_QUOTAS = """\
import sys, time
from megatron_hexi.cluster import read_cluster
from megatron_hexi.lab.testbed.quotas import rank_quotas
with rank_quotas(read_cluster(sys.argv[1])) as quotas:
    print(quotas[0].cgroup, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def start(tmp_path):
    """Starts ``hexi testbed run`` on two nodes with links, without speeds; killed at the test's end."""
    started = []
    # Where the tests are a shell's background job, they ignore Ctrl-C, and so would what they start.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(fail="pass"):
        (tmp_path / "pair.yaml").write_text(pair(memory=1, bandwidth=0.002))
        (tmp_path / "job.py").write_text(JOB.format(fail=fail))
        words = ("run", "pair.yaml", "--speeds", "none", "-o", "run", "--", "job.py")
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hexi.cli.main", "testbed", *words],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    signal.signal(signal.SIGINT, ignored)
    for process in started:
        process.kill()
        process.wait()


def name_of(process):
    """Its name, if it still runs."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def family(process):
    """The lab's processes once both ranks run."""
    top = psutil.Process(process.pid)

    def running():
        if process.poll() == 4:
            pytest.skip(f"this machine is too busy to be a testbed: {process.communicate()[1]}")
        assert process.poll() is None, process.communicate()
        return [name_of(child) for child in top.children(recursive=True)].count("sleep") == 2

    wait_for(running, 120)
    return top.children(recursive=True)


def wait_for(true, seconds):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def network_namespaces(processes):
    return {os.readlink(f"/proc/{process.pid}/ns/net") for process in processes}


def assert_gone(processes, namespaces):
    psutil.wait_procs(processes, timeout=20)
    assert [process for process in processes if process.is_running()] == []
    others = [f"/proc/{pid}/ns/net" for pid in psutil.pids()]
    left = {os.readlink(path) for path in others if os.access(path, os.R_OK) and os.path.exists(path)}
    assert not left & namespaces
    assert subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),  # not handled either
        signal.SIGINT,
    ],
)
def test_killed_in_the_middle_it_leaves_nothing(start, how):
    process = start()
    processes = family(process)
    namespaces = network_namespaces(processes) - network_namespaces([psutil.Process()])
    assert len(namespaces) >= 4  # the lab's own, two nodes', two ranks'; the switch has no process
    process.send_signal(how)
    code = process.wait(timeout=30)
    assert code == (130 if how == signal.SIGINT else -how)
    assert_gone(processes, namespaces)


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        pytest.param(  # its message: tests/unit/lab/test_testbed.py
            *("sys.exit(7)", 7, "rank 1 (slow-0/0) ended with exit code 7"), marks=pytest.mark.slow
        ),
        ("bytearray(2**31)", 1, "rank 1 (slow-0/0) is out of memory: core has 1 GiB (RLIMIT_DATA"),
        ("os.kill(os.getpid(), 9)", 1, "no rank has said why"),
    ],
)
def test_a_jobs_failure_is_passed_on_and_leaves_nothing(start, tmp_path, fail, code, said):
    process = start(fail)
    processes = family(process)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=250)
    assert process.returncode == code
    assert said in out + err
    assert_gone(processes, set())


@pytest.mark.skipif(os.geteuid() != 0, reason="quotas need root")
def test_quotas_go_with_the_process_that_made_them(tmp_path):
    (tmp_path / "pair.yaml").write_text(pair())
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_QUOTAS, tmp_path / "pair.yaml"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()
    if not folder:
        said = holder.communicate()[1]
        assert "quotas need root and the cpu controller" in said
        pytest.skip("this root may not make control groups")
    assert Path(folder).is_dir()
    holder.kill()
    holder.communicate()
    wait_for(lambda: not Path(folder).parent.exists(), 30)


@pytest.mark.slow  # two minutes: tokens are paced in real time
def test_a_paced_training_over_links_is_the_same_training(forks, tmp_path):
    plan = tmp_path / "plan.yaml"
    workload = Workload(seq_length=64, heads=4, kv_heads=4, head_dim=16, layers=2, hidden_size=64)
    uneven = proportional_plan(workload, [[[2.0, 2.0], [1.0, 1.0]]])
    write_plan(uneven, plan)
    expected = forks.train(tmp_path, ranks=4, args=TINY_GPT, plan=uneven)

    (tmp_path / "pair.yaml").write_text(pair(gpus=2, rate=0.002, bandwidth=0.002))
    metrics = tmp_path / "paced.jsonl"
    job = ("-m", "megatron_hexi.pretrain_gpt", *TINY_GPT, "--hexi-plan", plan, "--hexi-metrics", metrics)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_hexi.cli.main", "testbed", "run", "pair.yaml"),
            *("-o", "run", "--json", "--", *job),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 4), done.stderr[-3000:]  # 4: a busy machine, said after the job's end
    found = json.loads((tmp_path / "run" / "testbed.json").read_text())
    if found["exit_code"] is None:
        pytest.skip(f"this machine is too busy to be a testbed: {found['problems']}")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses == expected.losses
    assert [row["gpu"] for row in found["pace"]] == [0, 1, 2, 3]
    assert all(row["operations"] > 0 for row in found["pace"])
    assert (done.stdout == "") == (done.returncode == 4)  # a testbed that is off reports nothing
