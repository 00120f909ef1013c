"""The scripts for sbatch on a real Slurm: probe, plan, training, failures; on the CPU.

Where Slurm is not installed, and can be, it is: tests/slurm/install.sh.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from megatron_hexi.plan import read_plan
from tests.megatron.launch import environment, read_metrics
from tests.slurm.emulate import GPUS, NODES, Slurm, missing, running_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts" / "slurm"
ITERATIONS = 20
SAVE_INTERVAL = 6

#: Large enough that the planner takes all of four cores.
ARGUMENTS = f"""\
--num-layers 2 --hidden-size 128 --num-attention-heads 4     # the model
--seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0
--micro-batch-size 1 --global-batch-size 2
--lr 1e-3 --train-iters {ITERATIONS} --eval-interval 1000 --eval-iters 0 --log-interval 1
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
--hexi-platform cpu --hexi-metrics metrics.jsonl
"""

_NODE = ("--exclusive", f"--ntasks-per-node={GPUS}", f"--gpus-per-node={GPUS}")
#: Until Slurm knows how the last start ended; what it hears later, it takes for the end of the next.
_SETTLED = timedelta(seconds=15)

_FAST, _SLOW = (("--partition=fast", "--nodes=1", *_NODE), ("--partition=slow", "--nodes=1", *_NODE))
#: What sbatch is asked for.
TWO_PARTITIONS = (*_FAST, ":", *_SLOW)
SWAPPED = (*_SLOW, ":", *_FAST)
ONE_PARTITION = ("--partition=all", "--nodes=2", "--constraint=[fast*1&slow*1]", *_NODE)


@dataclass
class Desk:
    """A folder in which an operator works, and the Slurm that jobs go to."""

    slurm: Slurm
    folder: Path

    def submit(self, script: str, *machines: str, **settings: str) -> str:
        """The number of a job."""
        words = [f"{name}={value}" for name, value in settings.items()]
        said = self.slurm.call(
            *("env", *words, "sbatch", "--parsable", *machines, str(SCRIPTS / script)), cwd=self.folder
        )
        return said.splitlines()[-1]

    def wait(self, job: str) -> str:
        """The state in which a job ends."""
        while self._goes_on(job):
            time.sleep(0.5)
        return self.fields(job)["JobState"]

    def wait_for_iteration(self, job: str, iteration: int) -> None:
        """Return when the job has done this iteration."""
        metrics = self.folder / "metrics.jsonl"
        while not metrics.exists() or iteration not in read_metrics(metrics, "").iterations:
            assert self._goes_on(job), self.said(job)
            time.sleep(0.1)

    def fields(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job; of its first component, if it has several."""
        first = self.slurm.call("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.partition("=")[::2] for word in first.split())

    def _goes_on(self, job: str) -> bool:
        """Whether a job has not ended; one that was requeued need not wait its two minutes."""
        fields = self.fields(job)
        requeued = datetime.fromisoformat(fields["SubmitTime"])
        if fields["JobState"] == "PENDING" and datetime.now() - requeued > _SETTLED:
            self._hasten(job)
        return fields["JobState"] in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}

    def _hasten(self, job: str) -> None:
        for line in self.slurm.call("scontrol", "--oneliner", "show", "job", job).splitlines():
            number = line.partition(" ")[0].partition("=")[2]
            words = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
            # It may have begun by itself meanwhile.
            subprocess.run(words, env=self.slurm.environment, capture_output=True, timeout=250, check=False)

    def said(self, job: str) -> str:
        """What a job came to and wrote, for the message of a test that fails."""
        logs = [*self.folder.glob(f"*-{job}.log"), *self.folder.glob(f"*/{job}/*.log")]
        texts = [f"== {log.name}\n{log.read_text()[-5000:]}" for log in logs]
        return "\n".join([str(self.fields(job)), *texts])


@pytest.fixture(scope="module")
def slurm():
    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run([HERE / "install.sh"], check=True, timeout=300)
    if why := missing():
        pytest.skip(f"Slurm: {why}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        with running_slurm() as started:
            yield started


@pytest.fixture(scope="module")
def planned(slurm, tmp_path_factory):
    """A cluster file that the probe has measured on fast0 and slow0, and a plan for it."""
    desk = Desk(slurm, tmp_path_factory.mktemp("planned"))
    (desk.folder / "job.args").write_text(ARGUMENTS)
    probe = "--quick --budget 0.2 --precision fp32 --hidden-size 128 --heads 4 --kv-channels 32"
    job = desk.submit("probe.sbatch", *TWO_PARTITIONS, PROBE=probe)
    assert desk.wait(job) == "COMPLETED", desk.said(job)
    job = desk.submit("plan.sbatch")
    assert desk.wait(job) == "COMPLETED", desk.said(job)
    assert "{name: fast0, " in (desk.folder / "cluster.yaml").read_text()
    plan = read_plan(desk.folder / "plan.yaml")
    assert plan.units == 2 * GPUS
    assert plan.workload.seq_length == 2048
    assert (plan.job.global_batch_size, plan.job.precision, plan.job.distributed_optimizer) == (
        2,
        "fp32",
        False,
    )
    return desk.folder


@pytest.fixture
def desk(slurm, planned, tmp_path):
    """A folder with arguments, cluster file and plan; all nodes are up."""
    folder = tmp_path / "a desk #1"
    folder.mkdir()
    for name in ("job.args", "cluster.yaml", "plan.yaml"):
        shutil.copy(planned / name, folder)
    _revive(slurm)
    return Desk(slurm, folder)


def _revive(slurm: Slurm) -> None:
    for node, state in slurm.states().items():
        if state.startswith("down"):
            slurm.start_node(node)
            slurm.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
    while set(slurm.states().values()) != {"idle"}:
        time.sleep(0.2)


@pytest.fixture(scope="module")
def undisturbed(slurm, planned):
    """The losses of a training that nothing happens to."""
    _revive(slurm)
    desk = Desk(slurm, planned)
    job = desk.submit("train.sbatch", *ONE_PARTITION)
    assert desk.wait(job) == "COMPLETED", desk.said(job)
    log = read_metrics(desk.folder / "metrics.jsonl", "")
    assert log.iterations == list(range(1, ITERATIONS + 1))
    assert log.losses[-1] < 0.7 * log.losses[0]
    return log.losses


@pytest.mark.parametrize(
    "machines", [TWO_PARTITIONS, SWAPPED, ONE_PARTITION], ids=["two-partitions", "swapped", "one-partition"]
)
def test_a_job_that_loses_a_node_goes_on_on_another_with_the_same_losses(desk, undisturbed, machines):
    job = desk.submit("train.sbatch", *machines, SAVE_INTERVAL=str(SAVE_INTERVAL))
    desk.wait_for_iteration(job, 2 * SAVE_INTERVAL + 2)
    hosts = (desk.folder / "logs" / job / "hosts").read_text().split()
    assert sorted(hosts) == ["fast0"] * GPUS + ["slow0"] * GPUS
    desk.slurm.kill_node("slow0")
    assert desk.wait(job) == "COMPLETED", desk.said(job)
    assert desk.fields(job)["Restarts"] == "1"
    _check(desk, job, undisturbed, resumed=[2 * SAVE_INTERVAL + 1])
    # The same ranks are on the node that stands in, and each node has its log.
    after = (desk.folder / "logs" / job / "hosts").read_text().split()
    assert after == [host.replace("slow0", "slow1") for host in hosts]
    logs = {log.stem: log.read_text() for log in (desk.folder / "logs" / job).glob("*.log")}
    assert set(logs) == {"fast0", "slow0", "slow1"}
    assert "successfully loaded checkpoint" in logs[after[0]]


def test_a_job_that_loses_a_rank_goes_on_from_the_user_s_own_checkpoints_and_not_forever(desk, undisturbed):
    own = desk.folder / "my runs" / "#1"
    with (desk.folder / "job.args").open("a") as arguments:
        arguments.write(f"--save='{own}' --save-interval {SAVE_INTERVAL} # not the script's\n")
    settings = {"LOGS": "my logs", "RESTARTS": "2"}
    job = desk.submit("train.sbatch", *ONE_PARTITION, **settings)
    for restart, iteration in enumerate((SAVE_INTERVAL + 1, 2 * SAVE_INTERVAL + 1, ITERATIONS - 1)):
        desk.wait_for_iteration(job, iteration)
        assert desk.fields(job)["Restarts"] == str(restart)
        _kill_a_rank(desk)
        killed = time.monotonic()
        while (desk.folder / f"train-{job}.log").read_text().count("train: exit code") == restart:
            time.sleep(0.1)
        print(f"{time.monotonic() - killed:.1f} s from kill -9 of a rank to the end of the step")
    assert desk.wait(job) == "FAILED"
    said = (desk.folder / f"train-{job}.log").read_text()
    assert said.count("train: starting again from the last checkpoint") == 2
    assert said.count(f"saves in {own}; goes on from {own}") == 3
    assert not (desk.folder / "checkpoints").exists()
    _check(desk, job, undisturbed[: ITERATIONS - 1], [SAVE_INTERVAL + 1, 2 * SAVE_INTERVAL + 1])
    # The others had the time to say who was lost.
    logs = "".join(log.read_text() for log in (desk.folder / "my logs" / job).glob("*.log"))
    assert "no longer heard of: rank " in logs


@pytest.mark.parametrize("holds_script", [False, True], ids=["goes-on", "requeued"])
def test_an_elastic_job_goes_on_without_a_node_or_is_requeued(desk, undisturbed, holds_script):
    job = desk.submit(
        "train.sbatch", "--no-kill", *ONE_PARTITION, SAVE_INTERVAL=str(SAVE_INTERVAL), ELASTIC="1"
    )
    desk.wait_for_iteration(job, SAVE_INTERVAL + 2)
    script = desk.fields(job)["BatchHost"]
    other = ({"fast0", "slow0"} - {script}).pop()
    desk.slurm.kill_node(script if holds_script else other)
    assert desk.wait(job) == "COMPLETED", desk.said(job)
    assert desk.fields(job)["Restarts"] == str(int(holds_script))
    said = (desk.folder / "logs" / job / f"{script}.log").read_text()
    print(*(line for line in said.splitlines() if "hexi: elastic" in line), sep="\n")
    if not holds_script:
        assert f"{GPUS} ranks on {script}-0; without {other}-0" in said
    _check(desk, job, undisturbed, resumed=[SAVE_INTERVAL + 1])


#: One of the ranks ends so; the others wait for it, as ranks on GPUs do, longer than any test.
ONE_ENDS = """\
import os, signal, time
from pathlib import Path

if os.environ["SLURM_PROCID"] == "1":
    Path("ended").touch()
    {end}
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("machines", "end", "code"),
    [
        (TWO_PARTITIONS, "os.kill(os.getpid(), signal.SIGKILL)", "143:0"),
        (ONE_PARTITION, "os._exit(2)", "2:0"),
    ],
    ids=["killed", "wrong-input"],
)
def test_a_rank_that_ends_frees_all_gpus_in_seconds(desk, machines, end, code):
    (desk.folder / "train.py").write_text(ONE_ENDS.format(end=end))
    restarts = "0" if code != "2:0" else "1"  # wrong input does not start again where it may
    job = desk.submit("train.sbatch", *machines, TRAIN="python 'train.py'", RESTARTS=restarts)
    assert desk.wait(job) == "FAILED", desk.said(job)
    held_s = time.time() - (desk.folder / "ended").stat().st_mtime
    print(f"{held_s:.1f} s from the end of a rank to the end of the job")
    assert held_s < 20
    assert desk.fields(job)["ExitCode"] in {code, code.replace("143", "137")}, desk.said(job)


def test_a_cancelled_job_does_not_come_back(desk):
    job = desk.submit("train.sbatch", *ONE_PARTITION)
    desk.wait_for_iteration(job, 1)
    desk.slurm.call("scancel", job)
    assert desk.wait(job) == "CANCELLED"
    assert "starting again" not in desk.said(job)


def _kill_a_rank(desk: Desk) -> None:
    """SIGKILL for a process that trains in the folder."""
    ranks = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(desk.folder)
        and "megatron_hexi.pretrain_gpt" in (process.info["cmdline"] or [])
        and process.info["cmdline"][0].endswith("python")
    ]
    ranks[0].send_signal(signal.SIGKILL)


def _check(desk: Desk, job: str, undisturbed: list[float], resumed: list[int]) -> None:
    """Every iteration's loss, those that were done twice included, is that of the undisturbed training."""
    log = read_metrics(desk.folder / "metrics.jsonl", "")
    starts = [after for before, after in itertools.pairwise(log.iterations) if after <= before]
    assert starts == resumed, desk.said(job)
    assert set(log.iterations) >= set(range(1, len(undisturbed) + 1))
    pairs = [(loss, i) for i, loss in zip(log.iterations, log.losses, strict=True) if i <= len(undisturbed)]
    assert [loss for loss, _ in pairs] == pytest.approx([undisturbed[i - 1] for _, i in pairs], rel=1e-5)


def _refused(desk: Desk, *machines: str) -> str:
    """What the job says that must not train, nor start again."""
    job = desk.submit("train.sbatch", *machines)
    assert desk.wait(job) == "FAILED"
    assert desk.fields(job)["ExitCode"] == "2:0"
    assert desk.fields(job)["Restarts"] == "0"
    assert not (desk.folder / "metrics.jsonl").exists()
    said = (desk.folder / f"train-{job}.log").read_text()
    (error,) = (line for line in said.splitlines() if line.startswith("hexi: error: "))
    return error


def test_a_plan_for_more_than_the_job_has_is_refused(desk):
    said = _refused(desk, "--partition=fast", "--nodes=1", *_NODE)
    assert "needs 2 nodes (fast0-0, slow0-0)" in said
    assert "1 host (fast0), and no host that is left matches slow0-0; ask sbatch for slow0" in said


def test_a_job_with_nodes_of_the_wrong_kind_is_refused(desk):
    said = _refused(desk, "--partition=fast", "--nodes=2", *_NODE)
    assert "the job has 2 hosts (fast0, fast1), and no host that is left matches slow0-0" in said


def test_a_plan_for_another_cluster_is_refused(desk):
    cluster = desk.folder / "cluster.yaml"
    cluster.write_text(cluster.read_text().replace("slow0", "gpu17"))
    assert "give the first one's file, or plan again" in _refused(desk, *ONE_PARTITION)


def test_a_cluster_file_with_names_that_slurm_does_not_know_is_refused(desk):
    for name in ("cluster.yaml", "plan.yaml"):
        lines = (desk.folder / name).read_text().replace("slow0", "gpu17").splitlines(keepends=True)
        # A plan that says nothing of its cluster, as one written by hand.
        (desk.folder / name).write_text("".join(line for line in lines if "cluster_digest" not in line))
    said = _refused(desk, *ONE_PARTITION)
    assert "Slurm knows no host, feature or partition gpu17" in said


def test_sbatch_refuses_a_partition_that_is_not_there(desk):
    said = desk.slurm.call(
        "sbatch", "--partition=h200", str(SCRIPTS / "train.sbatch"), cwd=desk.folder, code=1
    )
    assert "invalid partition specified: h200" in said


def test_nothing_is_left_behind(slurm):
    """Not even by one whose starter is killed: its processes end with it, its folder at the next start."""
    before = set(slurm.folder.parent.glob("hexi-slurm-*"))
    words = [sys.executable, "-m", "tests.slurm.emulate", "sleep", "600"]
    starter = subprocess.Popen(words, cwd=HERE.parents[1], env=slurm.environment)
    try:
        begun: list[psutil.Process] = []
        while [process.info["name"] for process in begun].count("slurmd") < len(NODES):
            assert starter.poll() is None
            time.sleep(0.2)
            new = {str(folder) for folder in set(slurm.folder.parent.glob("hexi-slurm-*")) - before}
            begun = [
                process for process in psutil.process_iter(["name", "cwd"]) if process.info["cwd"] in new
            ]
    finally:
        starter.kill()
        starter.wait()
    _, alive = psutil.wait_procs(begun, timeout=20)
    assert not alive
    with running_slurm() as again:
        assert not any(Path(folder).exists() for folder in new)
        assert slurm.folder.exists()
    assert not again.folder.exists()
