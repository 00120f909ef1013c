"""The scripts for sbatch, with Slurm's commands played by others. tests/slurm runs them on a real one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hexi.slurm.nodes import SINFO

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = sorted((REPOSITORY / "scripts" / "slurm").glob("*.sbatch"))
DOCUMENT = (REPOSITORY / "docs" / "slurm.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent

#: Stands for srun and scontrol: writes down its words; ends as FAILS says, and prints SAYS; `hexi place`
#: leaves its files, `hexi slurm-arguments` is the real one.
PLAYER = """\
#!{python} -IS
import json, os, sys
from pathlib import Path

name, words = Path(sys.argv[0]).name, sys.argv[1:]
with Path("calls.jsonl").open("a") as calls:
    calls.write(json.dumps([name, *words]) + "\\n")
if "place" in words:
    hosts = Path(words[words.index("-o") + 1])
    for part, text in json.loads(os.environ["HOSTS"]).items():
        hosts.with_name(f"hosts{{part}}").write_text(text)
if "slurm-arguments" in words:
    hexi = os.environ["HEXI"], "-m", "megatron_hexi.cli.main"
    os.execv(hexi[0], [*hexi, *words[words.index("hexi") + 1 :]])
if "--distribution=arbitrary" in words:
    print(os.environ.get("SAYS", ""), file=sys.stderr)
    if "ENDED" in os.environ:
        Path(os.environ["ENDED"]).touch()
sys.exit(json.loads(os.environ["FAILS"]).get("place" if "place" in words else name, 0))
"""

ARGUMENTS = """\
--num-layers 2 # of them
# nothing, and it's no quote
--lr \\
1e-3
--wandb-exp-name "run #3 of 'a b'" --wandb-entity a#b
"""

PLAIN = {"": "a\nb\nb\n", ".0": "a\nb\nb\n"}
MIXED = {"": "a\nb\nb\n", ".0": "b\nb\n", ".1": "a\n"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_linter_finds_nothing(script):
    run = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, timeout=250)
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_settings_are_at_the_top_and_documented(script):
    head, body = script.read_text(encoding="utf-8").split("\nset -euo pipefail\n")
    settings = re.findall(r"^([A-Z_]+)=\$\{\1:-(.*)\}(?= .*# )", head, re.MULTILINE)
    assert len(settings) == len(re.findall(r"^[A-Z_]+=", head, re.MULTILINE)) > 3
    for name, _ in settings:
        assert f"`{name}`" in DOCUMENT
        assert re.search(rf"\b{name}\b", body)
    assert not re.findall(r"^#SBATCH", body, re.MULTILINE)  # sbatch would not read them there
    for line in re.findall(r"^#SBATCH.*", head, re.MULTILINE):
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?( +# .*)?", line)


def test_there_are_three_scripts():
    assert [path.stem for path in SCRIPTS] == ["plan", "probe", "train"]


@pytest.fixture
def submit(forks, tmp_path):
    """Runs a script as slurmd would, in a folder with Megatron's arguments; gives its exit code and calls."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "sinfo"):
        player = tmp_path / "bin" / name
        player.write_text(PLAYER.format(python=sys.executable))
        player.chmod(0o755)
    (tmp_path / "job.args").write_text(ARGUMENTS)
    for name in ("plan.yaml", "my plan.yaml"):
        shutil.copy(REPOSITORY / "docs" / "images" / "plan.yaml", tmp_path / name)

    def run(script, hosts=PLAIN, fails=None, **variables):
        environment = {
            "PATH": os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]),
            "SLURM_JOB_ID": "7",
            "PYTHONPATH": str(REPOSITORY),
            "HEXI": str(forks.python),
            "HOSTS": json.dumps(hosts),
            "FAILS": json.dumps(fails or {}),
        }
        done = subprocess.run(
            [REPOSITORY / "scripts" / "slurm" / script],
            env=environment | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
        )
        calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        listings = [call for call in calls if call[0] == "sinfo"]
        assert all(call == list(SINFO) for call in listings)
        return done.returncode, [call for call in calls if call not in listings]

    return run


def test_a_plain_job_is_one_step(submit):
    code, (arguments, place, step) = submit(
        "train.sbatch", CONTAINER="--container-image=x --container-workdir=/w"
    )
    container = ["--container-image=x", "--container-workdir=/w"]
    assert code == 0
    assert arguments == [
        *("srun", "--nodes=1", "--ntasks=1", *container, "hexi", "slurm-arguments", "job.args"),
        *("--plan", "plan.yaml", "--checkpoints", "checkpoints", "--save-interval", "500"),
        *("-o", "logs/7/arguments"),
    ]
    assert place == [
        *("srun", "--nodes=1", "--ntasks=1", *container, "hexi", "place", "plan.yaml"),
        *("--cluster", "cluster.yaml", "-o", "logs/7/hosts"),
    ]
    assert step == [
        *("srun", "--ntasks=3", "--distribution=arbitrary", "--nodelist=logs/7/hosts.0"),
        *("--output=logs/7/%N.log", "--open-mode=append", "--kill-on-bad-exit=1", "--wait=300"),
        *("--cpu-bind=none", *container, "python", "-m", "megatron_hexi.pretrain_gpt"),
        *(
            "--num-layers",
            "2",
            "--lr",
            "1e-3",
            "--wandb-exp-name",
            "run #3 of 'a b'",
            "--wandb-entity",
            "a#b",
        ),
        *("--hexi-plan", "plan.yaml", "--save", "checkpoints", "--load", "checkpoints"),
        *("--save-interval", "500", "--ckpt-format", "torch_dist"),
    ]


def test_a_heterogeneous_job_is_one_step_of_its_components(submit):
    code, (*_, step) = submit("train.sbatch", MIXED, SLURM_HET_SIZE="2")
    assert code == 0
    assert step.count(":") == 1
    parts = step[1 : step.index(":")], step[step.index(":") + 1 :]
    for group, (part, tasks) in enumerate(zip(parts, (2, 1), strict=True)):
        assert part[:2] == [f"--het-group={group}", f"--ntasks={tasks}"]
        assert f"--nodelist=logs/7/hosts.{group}" in part
    assert parts[0][4:] == parts[1][4:]


NODES = "a big-0 1\nb small-0 2\n"


def test_an_elastic_job_has_one_task_a_node_which_meet_where_the_script_runs(submit):
    code, (_, place, step) = submit(
        "train.sbatch",
        MIXED | {".nodes": f"{NODES}c small-1 2 spare\n"},
        SLURM_HET_SIZE="2",
        ELASTIC="1",
        SLURMD_NODENAME="b",
    )
    assert (code, step.count(":"), place[-1]) == (0, 1, "--spares")
    for group, part in enumerate((step[1 : step.index(":")], step[step.index(":") + 1 :])):
        assert part[:2] == [f"--het-group={group}", "--ntasks=1"]
        assert f"--nodelist=logs/7/tasks.{group}" in part
        assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} < set(part)
        command = part[part.index("python") :]
        assert command[: command.index("--wandb-exp-name")] == [
            *("python", "-m", "megatron_hexi.elastic", "--nnodes", "1:2", "--nodes", "logs/7/hosts.nodes"),
            *("--wait-for-nodes", "60", "--rdzv-endpoint", "b:20007", "--rdzv-id", "7"),
            *("--ended", "logs/7/ended", "--when-store-lost", "logs/7/alone"),
            *("--", "--hexi-cluster", "cluster.yaml"),
            *("--num-layers", "2", "--lr", "1e-3"),
        ]


@pytest.mark.parametrize("ended", [True, False])
def test_an_elastic_job_that_lost_a_node_has_ended_well_if_it_says_so(submit, tmp_path, ended):
    files = {"": "a\n", ".0": "a\n", ".nodes": NODES}
    (tmp_path / "logs/7").mkdir(parents=True)
    (tmp_path / "logs/7/ended").touch()  # of an earlier start
    ending = {"ENDED": "logs/7/ended"} if ended else {}
    code, calls = submit("train.sbatch", files, fails={"srun": 143}, ELASTIC="1", **ending)
    assert code == (0 if ended else 143)
    assert (["scontrol", "requeue", "7"] in calls) != ended
    assert "a:20007" in calls[2]


@pytest.mark.parametrize(
    ("fails", "restarts", "again"),
    [
        ({}, 0, False),
        ({"srun": 1}, 0, True),
        ({"srun": 137}, 2, True),
        ({"srun": 137}, 3, False),
        ({"srun": 2}, 0, False),
        ({"place": 2}, 0, False),
        ({"place": 1}, 0, False),
    ],
)
def test_what_another_start_may_mend_is_started_again(submit, fails, restarts, again):
    code, calls = submit("train.sbatch", fails=fails, SLURM_RESTART_COUNT=str(restarts))
    assert code == next(iter(fails.values()), 0)
    assert (["scontrol", "requeue", "7"] in calls) == again
    assert len(calls) == (2 if "place" in fails else 3) + again


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("srun: error: a: task 1: Exited with exit code 2\nsrun: error: b: tasks 0,2: Terminated", 2),
        ("srun: error: a: tasks 0-1: Exited with exit code 2", 2),
        ("srun: error: a: task 1: Killed\nsrun: error: b: tasks 0,2: Exited with exit code 1", 143),
        ("srun: error: a: task 1: Exited with exit code 23", 143),
    ],
)
def test_one_rank_that_finds_wrong_input_is_enough(submit, says, code):
    """The others are killed meanwhile, and srun ends with the highest exit code."""
    found, calls = submit("train.sbatch", fails={"srun": 143}, SAYS=says)
    assert found == code
    assert (["scontrol", "requeue", "7"] in calls) == (code != 2)


def test_what_the_user_says_of_checkpoints_stands(submit, tmp_path):
    own = "--save '/data/my runs' --save-interval=10"
    (tmp_path / "job.args").write_text(f"{ARGUMENTS}{own}\n")
    _, (*_, step) = submit("train.sbatch")
    assert step[step.index("--save") :] == [
        *("--save", "/data/my runs", "--save-interval=10", "--hexi-plan", "plan.yaml"),
        *("--load", "/data/my runs", "--ckpt-format", "torch_dist"),
    ]


def test_settings_may_have_words_with_blanks(submit):
    _, (*_, step) = submit(
        "train.sbatch", TRAIN="python 'my scripts/train.py'", PLAN="my plan.yaml", LOGS="a b"
    )
    assert step[step.index("python") :][:2] == ["python", "my scripts/train.py"]
    assert {"--nodelist=a b/7/hosts.0", "--output=a b/7/%N.log", "my plan.yaml"} < set(step)


@pytest.mark.parametrize("setting", ["TRAIN", "SRUN", "CONTAINER"])
def test_a_setting_with_an_open_quote_starts_nothing(submit, tmp_path, setting):
    (tmp_path / "calls.jsonl").touch()
    code, calls = submit("train.sbatch", **{setting: "python 'my"})
    assert (code != 0, calls) == (True, [])


def test_without_arguments_for_megatron_nothing_is_started(submit, tmp_path):
    code, calls = submit("train.sbatch", ARGUMENTS="absent.args")
    assert (code, len(calls)) == (2, 1)


def test_machines_that_the_doctor_finds_ill_are_not_measured(submit):
    code, calls = submit("probe.sbatch", fails={"srun": 2})
    assert (code, len(calls)) == (2, 1)


def test_the_probe_and_the_plan_take_their_settings(submit):
    _, (doctor, probe) = submit("probe.sbatch", SLURM_HET_SIZE="3", PROBE="--quick --hidden-size 64")
    step = ["srun", "--cpu-bind=none", "--het-group=0-2", "hexi"]
    assert doctor == [*step, "doctor"]
    assert probe == [*step, "probe", "-o", "cluster.yaml", "--quick", "--hidden-size", "64"]
    _, (*_, plan) = submit("plan.sbatch")
    assert plan == ["srun", "hexi", "plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml"]
    _, (*_, plan) = submit("plan.sbatch", MODEL="gpt-7b", JOB="--seq-length 4096")
    assert plan == [
        *("srun", "hexi", "plan", "cluster.yaml", "--model", "gpt-7b", "-o", "plan.yaml"),
        *("--seq-length", "4096"),
    ]
