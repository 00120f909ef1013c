"""Checkpoints and folders that cannot be used end a job by name, with a remedy, and without a traceback."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from megatron_hexi.plan import write_plan
from tests.megatron.option_cases import Case
from tests.megatron.test_uneven_training import MODEL

JOB = [*MODEL, "--train-iters", "4", "--lr-decay-iters", "4"]
PLAN = "no-heads"  # of two ranks


@pytest.fixture(scope="module")
def saved(forks, tmp_path_factory):
    """A folder with the iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    words = [*JOB, "--save", folder / "weights", "--save-interval", "2"]
    forks.train(folder, ranks=2, args=words, plan=Case().plans()[PLAN])
    return folder / "weights"


@pytest.fixture
def weights(saved, tmp_path):
    """A copy of it that may be damaged."""
    shutil.copytree(saved, tmp_path / "weights")
    return tmp_path / "weights"


def refused(forks, tmp_path, words, **entry):
    """The one line that all ranks end with."""
    write_plan(Case().plans()[PLAN], tmp_path / "plan.yaml")
    outcome = forks.launch(tmp_path, ranks=2, args=[*words, "--hexi-plan", "plan.yaml"], timeout=250, **entry)
    assert outcome.codes == [2, 2], outcome.output
    lines = []
    for output in outcome.output:
        assert "Traceback" not in output
        assert "usage:" not in output
        (line,) = (line for line in output.splitlines() if line.startswith("hexi: error: "))
        lines.append(line)
    return lines[0].partition("] ")[2]


def test_a_checkpoint_of_another_model(forks, saved, tmp_path):
    line = refused(forks, tmp_path, [*JOB, "--ffn-hidden-size", "200", "--load", saved])
    assert line.startswith(f"--load {saved}: the checkpoint is of another model: it has ")
    assert "ffn-hidden-size 256" in line
    assert "this job ffn-hidden-size 200" in line


def truncate(weights):
    for file in (weights / "iter_0000004").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_common(weights):
    (weights / "iter_0000004" / "common.pt").write_bytes(b"")


def remove_file(weights):
    next((weights / "iter_0000004").glob("*.distcp")).unlink()


@pytest.mark.parametrize("damage", [truncate, empty_common, remove_file])
def test_a_damaged_checkpoint(damage, forks, weights, tmp_path):
    damage(weights)
    line = refused(forks, tmp_path, [*JOB, "--load", weights])
    assert line.startswith(f"--load {weights}: iteration 4 cannot be read: a file of it is damaged or ")
    assert line.endswith("it holds 2 too: add --ckpt-step 2 to go on from there")


def test_an_iteration_that_is_missing(forks, weights, tmp_path):
    words = [*JOB, "--load", weights]
    assert "--ckpt-step 7, and there is no folder iter_0000007; it holds 2, 4 too" in refused(
        forks, tmp_path, [*words, "--ckpt-step", "7"]
    )
    shutil.rmtree(weights / "iter_0000004")
    line = refused(forks, tmp_path, words)
    assert "latest_checkpointed_iteration.txt says 4, and there is no folder iter_0000004" in line
    assert "--ckpt-step 2" in line


def test_folders_that_are_none(forks, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["--save", "file"], "--save file: is a file, not a folder; give another"),
        (["--save", "file/weights"], "--save file/weights: "),
        (["--tensorboard-dir", "file"], "--tensorboard-dir file: is a file, not a folder; give another"),
        (["--load", "file"], "--load file: is a file; give the folder that --save wrote"),
        (["--load", "empty"], "--load empty: holds no checkpoint"),
        (["--load", "nowhere", "--save", "elsewhere"], "--load nowhere: holds no checkpoint"),
        (
            ["--pretrained-checkpoint", "empty", "--load", "new", "--save", "new"],
            "--pretrained-checkpoint empty: holds no checkpoint",
        ),
    ):
        assert refused(forks, tmp_path, [*JOB, *words]).startswith(said)


def test_more_iterations_than_the_checkpoint_was_trained_for(forks, saved, tmp_path):
    longer = [*MODEL, "--train-iters", "6", "--load", saved]
    line = refused(forks, tmp_path, longer)
    assert "total number of samples was" in line
    assert "give the --train-iters (or --lr-decay-iters)" in line
    assert "add --override-opt-param-scheduler" in line
    log = forks.train(
        tmp_path / "on",
        ranks=2,
        args=[*longer, "--override-opt-param-scheduler"],
        plan=Case().plans()[PLAN],
    )
    assert log.iterations == [5, 6]


def test_a_typo_is_one_line_that_names_the_nearest_option(forks, tmp_path):
    line = refused(forks, tmp_path, [*JOB, "--train-itrs", "4"])
    assert line.startswith("unrecognized arguments: --train-itrs 4; did you mean --train-iters?")
    assert refused(forks, tmp_path, [*JOB, "--tensor-model-parallel-size", "two"]).startswith(
        "argument --tensor-model-parallel-size: invalid int value: 'two'"
    )


@pytest.mark.parametrize("format_", ["torch_dist", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_disk_that_is_full(forks, tmp_path, format_):
    words = [*JOB, "--save", "saved", "--save-interval", "2", "--ckpt-format", format_]
    line = refused(forks, tmp_path, words, entry="tests.megatron.full_save")
    assert line.startswith(
        "--save saved: the checkpoint of iteration 2 cannot be written (File too large); make"
    )


#: What is no folder of weights, or no new name, for a conversion; and what is said of it.
UNCONVERTED = {
    "a FIFO": (("hf-to-megatron", "fifo", "out"), "fifo/model.safetensors: no regular file"),
    "a name too long": (("hf-to-megatron", "fifo", "x" * 300), "cannot be made in"),
    "no name": (("hf-to-megatron", "fifo", "."), ".: is there already"),
    "an empty name": (("hf-to-megatron", "", "out"), "HF_FOLDER: is empty"),
    "no iteration": (("megatron-to-hf", "weights", "out", "--like", "fifo"), "'x' is not an iteration; give"),
}


@pytest.mark.parametrize("kind", UNCONVERTED)
def test_what_is_not_converted(forks, tmp_path, kind):
    (tmp_path / "fifo").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "fifo/config.json").write_text(
        json.dumps({**config, "intermediate_size": 8, "vocab_size": 9})
    )
    os.mkfifo(tmp_path / "fifo/model.safetensors")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/latest_checkpointed_iteration.txt").write_text("x")
    words, said = UNCONVERTED[kind]
    outcome = forks.launch(tmp_path, ranks=1, args=words, entry="tests.megatron.converting", timeout=250)
    assert outcome.codes == [2], outcome.output
    assert said in outcome.output[0]
    assert "Traceback" not in outcome.output[0]
    assert not (tmp_path / "out").exists()
