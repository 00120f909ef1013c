"""A checkpoint that somebody made up runs no program, whoever reads it; what is no checkpoint is refused."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_hexi.plan import write_plan
from tests.megatron.conversion import Conversion
from tests.megatron.option_cases import Case
from tests.megatron.test_tutorial import LLAMA, write_model
from tests.megatron.test_uneven_training import MODEL

JOB = (*MODEL, "--train-iters", "2", "--lr-decay-iters", "2")


class Program:
    """Called when the pickle is read: leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.system, (f"touch {self.trace}",)


def metadata_of(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as stream:
        return pickle.load(stream)


def write_metadata(folder: Path, content: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def in_place_of_metadata(folder: Path, program: Program) -> None:
    write_metadata(folder, program)


def in_metadata(folder: Path, program: Program) -> None:
    """The rest of the metadata is right, so that a job would read on from it."""
    metadata = metadata_of(folder)
    metadata.planner_data = program
    write_metadata(folder, metadata)


def in_an_object(folder: Path, program: Program) -> None:
    """In place of the job's arguments, among the tensors."""
    metadata, written = metadata_of(folder), io.BytesIO()
    torch.save([program], written)
    (info,) = (info for at, info in metadata.storage_data.items() if at.fqn.startswith("common_state"))
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(written.getvalue())
    with file.open("ab") as stream:
        stream.write(written.getvalue())
    write_metadata(folder, metadata)


def in_the_common_state(folder: Path, program: Program) -> None:
    torch.save(program, folder / "common.pt")


def another_file(folder: Path, program: Program) -> None:
    metadata = metadata_of(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "/dev/zero"
    write_metadata(folder, metadata)


ATTACKS = {
    in_place_of_metadata: "posix.system",
    in_metadata: "posix.system",
    in_an_object: "posix.system",
    in_the_common_state: "posix.system",
    another_file: "/dev/zero",
}


def cut_metadata(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:1000])


def cut_tensors(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeros(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


#: What is done to a checkpoint, and a part of what is said.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda folder: (folder / ".metadata").write_text("no metadata"), "invalid load key"),
    "empty": (lambda folder: (folder / ".metadata").write_bytes(b""), "Ran out of input"),
    "other-metadata": (lambda folder: write_metadata(folder, {"a": 1}), "holds a dict, not the metadata"),
    "cut-metadata": (cut_metadata, "truncated"),
    "no-metadata": (lambda folder: (folder / ".metadata").unlink(), "its .metadata is missing"),
    "no-format": (lambda folder: (folder / "metadata.json").unlink(), "damaged or missing"),
    "another-format": (lambda folder: (folder / "metadata.json").write_text("[1]"), "json is damaged"),
    "cut-format": (lambda folder: (folder / "metadata.json").write_text("{"), "metadata.json is damaged"),
    "cut-tensors": (cut_tensors, "EOFError"),
    "zeros": (zeros, "Unsupported operand"),
    "no-tensors": (lambda folder: next(folder.glob("*.distcp")).unlink(), "No such file"),
    "empty-common-state": (lambda folder: (folder / "common.pt").write_bytes(b""), "EOFError"),
}
#: Arguments of the trainings that read a checkpoint.
TRAININGS = {"training": (), "arguments": ("--use-checkpoint-args",)}
READERS = ("conversion", *TRAININGS)
#: Other readers of these go through the same code.
IN_CI = {"conversion": {"text", "no-format", "cut-tensors"}, "training": {"cut-metadata", "another-format"}}


@pytest.fixture(scope="module")
def written(forks, tmp_path_factory):
    """A folder with a model, a checkpoint of it, and one of `JOB` under a plan, with the plan."""
    folder = tmp_path_factory.mktemp("written")
    write_model(folder / "model", LLAMA)
    conversion = Conversion(forks, folder)
    conversion.convert("hf-to-megatron", "model", "weights")
    saving = ["--load", "weights", "--finetune", "--save", "conversion", "--save-interval", "3"]
    forks.train(folder, ranks=1, args=[*conversion.arguments(), *saving])
    plan = Case().plans()["no-heads"]
    forks.train(folder, ranks=2, args=[*JOB, "--save", "training", "--save-interval", "2"], plan=plan)
    write_plan(plan, folder / "plan.yaml")
    return folder


def refusal(reader: str, written: Path, change: Callable[[Path], object], forks, folder: Path) -> str:
    """The one line of an error that a reader of a changed checkpoint ends with, having written nothing."""
    kind = "conversion" if reader == "conversion" else "training"
    shutil.copytree(written / kind, folder / "checkpoint")
    change(next((folder / "checkpoint").glob("iter_*")))
    if kind == "conversion":
        words = ["megatron-to-hf", "checkpoint", "out", "--like", written / "model"]
        outcome = forks.launch(folder, ranks=1, args=words, entry="tests.megatron.converting", timeout=250)
    else:
        words = [*JOB, "--load", "checkpoint", "--hexi-plan", written / "plan.yaml", *TRAININGS[reader]]
        outcome = forks.launch(folder, ranks=2, args=words, timeout=250)
    assert set(outcome.codes) == {2}, outcome.why()
    output = outcome.output[0]
    # torch says by itself, with a traceback, that metadata are missing; arguments are read before any check.
    assert "Traceback" not in output or (reader == "arguments" and ".metadata is missing" in output)
    (line,) = (line for line in output.splitlines() if line.startswith("hexi: error: "))
    assert not (folder / "out").exists()
    return line


@pytest.mark.parametrize(
    ("reader", "attack"),
    [
        pytest.param(
            reader,
            attack,
            id=f"{reader}-{attack.__name__}",
            marks=pytest.mark.slow if reader == "arguments" and attack != in_an_object else (),
        )
        for reader in READERS
        for attack in ATTACKS
    ],
)
def test_no_program_runs(reader, attack, written, forks, tmp_path):
    trace = tmp_path / "trace"
    line = refusal(reader, written, lambda folder: attack(folder, Program(trace)), forks, tmp_path)
    assert not trace.exists()
    assert f"a file of it names {ATTACKS[attack]}, which is no part of a checkpoint" in line


@pytest.mark.parametrize(
    ("reader", "damage"),
    [
        pytest.param(reader, name, marks=() if name in IN_CI.get(reader, ()) else pytest.mark.slow)
        for reader in READERS
        for name in DAMAGES
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(reader, damage, written, forks, tmp_path):
    change, said = DAMAGES[damage]
    line = refusal(reader, written, change, forks, tmp_path)
    assert said in line or (damage == "no-format" and "Missing key" in line)
    remedy = "copy it again" if reader == "conversion" else "leave --load out to start from the beginning"
    assert remedy in line
