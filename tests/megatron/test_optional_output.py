"""What only watches a training says once that it cannot write, and the training goes on."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from argparse import Namespace

import pytest
from megatron.training import global_vars

from megatron_hexi import text_file
from megatron_hexi.errors import HexiError
from megatron_hexi.megatron import metrics
from megatron_hexi.megatron.optional_output import WRITER_PATCHES, GuardedWriter, OptionalOutput
from megatron_hexi.plan import write_plan
from megatron_hexi.text_file import append_line
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE

ITERATIONS = 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_fails_is_told_of_once_and_written_to_again(number, tmp_path, monkeypatch, capsys):
    output, path = OptionalOutput("--hexi-metrics"), tmp_path / "metrics.jsonl"

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    output.attempt(append_line, path, "1")
    with monkeypatch.context() as patch:
        patch.setattr(text_file, "open_private", fail)
        for line in ("2", "3"):
            output.attempt(append_line, path, line)
    output.attempt(append_line, path, "4")
    assert path.read_text() == "1\n4\n"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hexi: warning: [rank ")
    assert f"--hexi-metrics, until that can be written again: {path}: cannot be written" in line
    assert os.strerror(number) in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes what is read-only")
def test_a_file_that_becomes_read_only_is_told_of(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.touch(mode=0o444)
    OptionalOutput("--hexi-metrics").attempt(append_line, path, "1")
    assert "Permission denied" in capsys.readouterr().err


def test_a_log_on_the_same_full_disk_stops_nothing_either(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stderr", Full())
    OptionalOutput("--hexi-metrics").attempt(append_line, tmp_path, "1")


def test_of_a_writer_only_what_writes_is_spared(capsys):
    class Writer:
        run = Namespace(id=7)

        def log(self, values):
            raise RuntimeError("the service is gone")

        def use_artifact(self):
            raise KeyError("no such artifact")

    writer = GuardedWriter(Writer(), OptionalOutput("--wandb-project"), ("log", "finish"))
    writer.log({})
    writer.log({})
    assert capsys.readouterr().err.count("the service is gone") == 1
    assert writer.run.id == 7
    with pytest.raises(KeyError):
        writer.use_artifact()


@pytest.mark.parametrize(("rank", "folder", "warns"), [(1, "a", True), (0, "a", False), (1, None, False)])
def test_a_missing_tensorboard_is_said_by_the_rank_that_would_write(rank, folder, warns, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    patch = next(patch for patch in WRITER_PATCHES if "tensorboard" in patch.target)
    args = Namespace(tensorboard_dir=folder, rank=rank, world_size=2, tensorboard_queue_size=1)
    patch.build(global_vars._set_tensorboard_writer)(args)
    said = "--tensorboard-dir a: nothing is written, tensorboard is not installed; pip install tensorboard"
    assert (said in capsys.readouterr().err) is warns


def test_a_missing_library_of_a_writer_is_an_error_with_what_to_type():
    def set_writer(args):
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    patch = next(patch for patch in WRITER_PATCHES if "wandb" in patch.target)
    with pytest.raises(HexiError, match=r"--wandb-project needs wandb, .*; pip install wandb"):
        patch.build(set_writer)(Namespace())


def test_a_rank_checks_only_the_file_that_it_writes(tmp_path):
    def args(path, rank):
        return Namespace(hexi_metrics=str(path), rank=rank, world_size=2)

    metrics.check_metrics(args(tmp_path, 0))
    with pytest.raises(HexiError, match="is a folder; give the name of a file in it"):
        metrics.check_metrics(args(tmp_path, 1))
    with pytest.raises(HexiError, match=r"the folder .*new is not there; make it first"):
        metrics.check_metrics(args(tmp_path / "new" / "{rank}.jsonl", 0))
    (tmp_path / "new").mkdir()
    metrics.check_metrics(args(tmp_path / "new" / "{rank}.jsonl", 0))
    assert os.listdir(tmp_path / "new") == []


def test_training_goes_on_where_nothing_can_be_written_any_more(forks, tmp_path):
    (tmp_path / "gone").mkdir()
    words = [*MODEL, "--train-iters", str(ITERATIONS), "--log-interval", "1", "--hexi-platform", "cpu"]
    words += [
        "--hexi-plan",
        "plan.yaml",
        "--hexi-record",
        "gone/record.jsonl",
        "--hexi-metrics",
        "full.jsonl",
    ]
    words += ["--tensorboard-dir", "tensorboard", "--tensorboard-log-interval", "1"]
    words += ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", "wandb"]
    write_plan(THREE_AND_ONE, tmp_path / "plan.yaml")
    outcome = forks.launch(
        tmp_path, ranks=4, args=["gone", *words], entry="tests.megatron.full_disk", timeout=250
    )
    assert outcome.succeeded, outcome.why()
    lines = re.findall(r" iteration +(\d+)/", outcome.output[-1])
    assert lines == [str(number) for number in range(1, ITERATIONS + 1)]
    output = "".join(outcome.output)
    assert "Traceback" not in output
    warned = re.findall(r"hexi: warning: \[rank (\d)\] the training goes on without (\S+),", output)
    assert sorted(warned) == [
        ("0", "--hexi-record"),
        ("3", "--hexi-metrics"),
        ("3", "--tensorboard-dir"),
        ("3", "--wandb-project"),
    ]
    assert output.count("No space left on device") >= 1
    assert "full.jsonl: cannot be written (File too large)" in output
