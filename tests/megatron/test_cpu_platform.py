"""Megatron as it is, without a plan, trains on the CPU platform."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.forked import Forks
from tests.megatron.launch import REPOSITORY, TINY_GPT, TrainingLog, launch, train


@pytest.fixture(scope="module")
def one_rank(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> TrainingLog:
    return forks.train(tmp_path_factory.mktemp("one-rank"), ranks=1, args=TINY_GPT)


def assert_same_training(found: TrainingLog, expected: TrainingLog, relative: float = 1e-5) -> None:
    assert found.iterations == expected.iterations
    assert found.losses == pytest.approx(expected.losses, rel=relative)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=10 * relative)


def test_the_loss_falls_from_that_of_a_guess(one_rank: TrainingLog) -> None:
    assert one_rank.iterations == [1, 2, 3, 4]
    assert one_rank.losses[0] == pytest.approx(math.log(128), abs=0.1)
    assert one_rank.losses == sorted(one_rank.losses, reverse=True)


def test_two_data_parallel_ranks_train_as_one(forks: Forks, tmp_path: Path, one_rank: TrainingLog) -> None:
    assert_same_training(forks.train(tmp_path, ranks=2, args=TINY_GPT), one_rank)


def test_the_distributed_optimizer_trains_as_the_plain_one(
    forks: Forks, tmp_path: Path, one_rank: TrainingLog
) -> None:
    overlapped = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    assert_same_training(forks.train(tmp_path, ranks=2, args=[*TINY_GPT, *overlapped]), one_rank)


def test_bf16_stays_near(forks: Forks, tmp_path: Path, one_rank: TrainingLog) -> None:
    found = forks.train(tmp_path, ranks=2, args=[*TINY_GPT, "--bf16", "--use-distributed-optimizer"])
    assert_same_training(found, one_rank, relative=2e-3)


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(("--recompute-activations",), marks=pytest.mark.slow),
        ("--recompute-granularity", "full"),
    ],
)
def test_recomputation_changes_nothing(forks: Forks, tmp_path: Path, recompute: tuple[str, ...]) -> None:
    """With dropout, so that the random state has to be restored for the second forward pass."""
    if "full" in recompute:
        recompute = (*recompute, "--recompute-method", "uniform", "--recompute-num-layers", "1")
    dropout = [*TINY_GPT, "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--train-iters", "2"]
    plain = forks.train(tmp_path, ranks=1, args=dropout)
    assert_same_training(forks.train(tmp_path, ranks=1, args=[*dropout, *recompute]), plain)


@pytest.fixture(scope="module")
def checkpoint(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank saves after two iterations of four."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saving = ("--save", folder / "saved", "--save-interval", "2", "--exit-interval", "2")
    forks.train(folder, ranks=1, args=[*TINY_GPT, *saving])
    return folder / "saved"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, ("--tensor-model-parallel-size", "2"), marks=pytest.mark.slow),
        (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        (2, ("--pipeline-model-parallel-size", "2")),
    ],
)
def test_a_checkpoint_continues_identically_in_any_layout(
    forks: Forks, tmp_path: Path, one_rank: TrainingLog, checkpoint: Path, ranks: int, layout: tuple[str, ...]
) -> None:
    # The vocabulary is padded to the same size in every layout; random states belong to a layout.
    loading = ("--load", checkpoint, "--no-load-rng", "--make-vocab-size-divisible-by", "64")
    found = forks.train(tmp_path, ranks=ranks, args=[*TINY_GPT, *layout, *loading])
    assert found.iterations == [3, 4]
    assert found.losses == pytest.approx(one_rank.losses[2:], rel=1e-5)
    assert found.grad_norms == pytest.approx(one_rank.grad_norms[2:], rel=1e-4)


def test_a_virtual_pipeline_trains(forks: Forks, tmp_path: Path) -> None:
    layers = (
        "--num-layers",
        "4",
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
    )
    found = forks.train(tmp_path, ranks=2, args=[*TINY_GPT, *layers])
    assert found.losses == sorted(found.losses, reverse=True)


def test_evaluation_runs(forks: Forks, tmp_path: Path) -> None:
    found = forks.train(tmp_path, ranks=1, args=[*TINY_GPT, "--eval-interval", "2", "--eval-iters", "1"])
    for iteration in (2, 4):
        assert f"validation loss at iteration {iteration} |" in found.output


def test_a_platform_that_is_not_there_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    """Found out where our package is imported, before Megatron is."""
    result = subprocess.run(
        [sys.executable, "-m", "megatron_hexi.pretrain_gpt", *TINY_GPT, "--hexi-platform", "cuda"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 2
    assert_one_error(result.stderr, "--hexi-platform cuda: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--distributed-backend", "nccl"), "--distributed-backend nccl: needs a GPU"),
        (("--fim-data",), "--fim-data does not work with megatron_hexi.pretrain_gpt: "),
    ],
)
def test_a_user_error_is_one_line_and_no_traceback(
    forks: Forks, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    outcome = forks.launch(tmp_path, ranks=1, args=[*TINY_GPT, *options])
    assert outcome.codes == [2]
    assert_one_error(outcome.output[0], message)


def assert_one_error(said: str, message: str) -> None:
    (line,) = (line for line in said.splitlines() if line.startswith("hexi: error:"))
    assert message in line
    assert "Traceback" not in said


SCRIPT = """
import sys
if {megatron_first}:
    import megatron.training
    import megatron.core.models.gpt
{adaptor}
from helper import NAME  # beside the script, as Python finds it
from megatron_hexi.megatron.gpt import pretrain_from_command_line
if __name__ == "__main__":
    print("script", NAME, sys.argv[0])
    pretrain_from_command_line()
"""


@pytest.mark.parametrize(
    "way",
    ["run", *(pytest.param(way, marks=pytest.mark.slow) for way in ("import", "import after Megatron"))],
)
def test_a_script_of_the_users_own(forks: Forks, tmp_path: Path, one_rank: TrainingLog, way: str) -> None:
    """Through the launcher, or with our import in it: the same training, and checkpoints are saved.

    The rank is not forked, so that our package and Megatron are imported in the script's order.
    """
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    (script.parent / "helper.py").write_text("NAME = 'helper'\n")
    adaptor = "" if way == "run" else "import megatron_hexi.adaptor"
    script.write_text(SCRIPT.format(megatron_first=way == "import after Megatron", adaptor=adaptor))
    entry = ("-m", "megatron_hexi.run", str(script)) if way == "run" else (str(script),)
    found = train(
        tmp_path,
        ranks=1,
        args=[*TINY_GPT, "--save", tmp_path / "saved", "--save-interval", "4"],
        entry=entry,
        python=forks.python,
        rank_python=sys.executable,
    )
    assert_same_training(found, one_rank, relative=1e-7)
    assert f"script helper {script}" in found.output
    assert "hexi: no GPU found: running on the CPU with gloo" in found.output
    assert (tmp_path / "saved" / "iter_0000004").is_dir()


@pytest.mark.parametrize("args", [[], ["no_such_script.py"]])
def test_the_launcher_without_a_script_shows_its_usage(forks: Forks, tmp_path: Path, args: list[str]) -> None:
    result = launch(tmp_path, ranks=1, args=args, entry="megatron_hexi.run", python=forks.python)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("hexi: error: [rank 0]"))
    assert "usage: python -m megatron_hexi.torchrun" in line
    assert "exitcode  : 2" in result.stderr
