"""``hexi capture``: a script runs up to its start of a training, whose arguments are written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron_hexi.argument_file import read_words
from tests.support.shell import is_one_error_line

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
