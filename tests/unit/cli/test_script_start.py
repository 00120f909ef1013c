"""``hexi capture``: a script runs up to its start of a training, whose arguments are written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron_hexi.argument_file import read_words
from tests.support.shell import is_one_error_line
from tests.unit.cli.conftest import ARGUMENTS as JOB_ARGUMENTS
from tests.unit.cli.conftest import JOB

ARGUMENTS = ["--micro-batch-size", "1", "--save", "a b", "--split", "'99,1,0'", "--data-path", "$x `y`", ""]
TRAINING = f"pretrain_gpt.py {shlex.join(ARGUMENTS)}"


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (f"torchrun --nproc_per_node $N {TRAINING}", "torchrun pretrain_gpt.py"),
        (f"torchrun --standalone -m megatron_hexi.run {TRAINING}", "torchrun pretrain_gpt.py"),
        (f"torchrun -m megatron_hexi.{TRAINING.replace('.py', '')}", "torchrun megatron_hexi.pretrain_gpt"),
        (f"python3 -m torch.distributed.run {TRAINING} | tee log", "python3 pretrain_gpt.py"),
        (
            f"srun -l --export=ALL /usr/bin/bash -c {shlex.quote(f'python -u {TRAINING}')}",
            "python pretrain_gpt.py",
        ),
        (f"mpirun -np 8 /opt/conda/bin/python {TRAINING} & wait", "python pretrain_gpt.py"),
    ],
)
def test_the_words_of_the_first_start_are_written_and_nothing_after_it_is_done(hexi, start, said):
    Path("train.sh").write_text(f'N=8\npython3 -c \'open("before", "w")\'\n{start}\ntouch after\n')
    result = hexi("capture", "-o", "job.args", "--", "bash", "train.sh")
    assert (result.code, result.out) == (0, "")
    assert f"note: not started: {said}\nwrote job.args" in result.err
    assert read_words(Path("job.args")) == ARGUMENTS
    assert Path("before").exists()
    assert not Path("after").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "bash train.sh: ended with exit code 3, and started no training by torchrun"),
        ("torchrun x.py", "bash train.sh: torchrun starts x.py without arguments; give the command"),
        ("srun hostname", "ended with exit code 1, and started no training"),
        (
            "torchrun a.py --micro-batch-size 1\ntorchrun b.py --micro-batch-size 1",
            "starts 2 different trainings",
        ),
    ],
)
def test_a_command_that_trains_nothing_is_one_clear_error(hexi, script, said):
    Path("train.sh").write_text(script)
    result = hexi("capture", "-o", "job.args", "--", "bash", "train.sh")
    assert result.code == 2
    assert said in result.err
    assert not Path("job.args").exists()


def test_a_command_that_is_not_there_is_one_clear_error(hexi):
    result = hexi("capture", "-o", "job.args", "--", "./absent")
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert "./absent: cannot be run (No such file or directory)" in result.err


def test_stand_ins_leave_nothing_behind(hexi, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    Path("train.sh").write_text(f"sleep 60 &\ntrap 'touch cleaned' TERM\ntorchrun {TRAINING}\n")
    assert hexi("capture", "-o", "job.args", "--", "bash", "train.sh").code == 0
    assert sorted(os.listdir(tmp_path)) == ["cleaned", "cluster.yaml", "job.args", "train.sh"]


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Puts a program on PATH that writes down its words and fails."""

    def put(name):
        Path("bin").mkdir()
        Path("bin", name).write_text('#!/bin/sh\nprintf "%s\\n" "$@" > started\nexit 5\n')
        Path("bin", name).chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")

    return put


def test_launch_starts_the_training_of_a_script_with_the_plan(hexi, asked, program, tmp_path):
    program("torchrun")
    flags = "--tensor-model-parallel-size $TP --data-path 'a b' --micro-batch-size 1"
    Path("train.sh").write_text(f"TP=2\ntorchrun --standalone pretrain_gpt.py {flags} --lr 1\n")
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    result = hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--", "bash", "train.sh")
    assert (result.code, result.out) == (5, "")
    words = Path("started").read_text().splitlines()
    assert words[:4] == ["--standalone", "-m", "megatron_hexi.run", "pretrain_gpt.py"]
    assert words[-2:] == ["--hexi-plan", str(tmp_path / "plan.yaml")]
    assert ("a b" in words, "--lr" in words, "--tensor-model-parallel-size" in words) == (True, True, False)


@pytest.mark.parametrize(
    ("start", "code"),
    [("bash -c 'torchrun x.py'", 2), ("-N2 bash worker.sh", 2), ("bash -lc 'mkdir a'", 5), ("hostname", 5)],
)
def test_launch_refuses_a_training_that_starts_in_a_shell_of_other_nodes(hexi, asked, program, start, code):
    program("srun")
    Path("train.sh").write_text(f"srun {start}\n")
    Path("worker.sh").write_text(f"torchrun {TRAINING}\n")
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    assert hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--", "bash", "train.sh").code == code
    assert Path("started").exists() == (code == 5)


def test_plan_plans_what_a_script_would_start(hexi, asked):
    Path("model.args").write_text(JOB_ARGUMENTS)
    Path("train.sh").write_text('torchrun pretrain_gpt.py $(sed "s/#.*//" model.args)\ntouch after\n')
    result = hexi("plan", "cluster.yaml", "-o", "plan.yaml", "--", "bash", "train.sh")
    assert result.code == 0
    assert "wrote plan.args: Megatron's arguments of bash train.sh" in result.err
    assert (asked[0][0].job.seq_length, asked[0][0].job.global_batch_size) == (4096, 4)
    assert not Path("after").exists()
    both = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--", "bash", "train.sh")
    neither = hexi("plan", "cluster.yaml", "-o", "plan.yaml")
    assert (both.code, neither.code) == (2, 2)
    assert "--model gpt-3b beside -- bash: the command says the model; leave --model out" in both.err
    assert "--model is missing; give NAME|PATH" in neither.err
