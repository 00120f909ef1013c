"""A user's mistake: one line, its exit code, and time for other ranks where torchrun would end them."""

import json
import os
import subprocess
import sys
import time

import pytest

from megatron_hexi import speaker
from megatron_hexi.errors import HexiError, NothingFitsError, user_errors
from megatron_hexi.speaker import say_error

#: By which ranks of a launcher are told from others.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_STEP_ID", "TORCHELASTIC_ERROR_FILE"),
)


@pytest.fixture
def waited(monkeypatch):
    """How long each of the mistakes made here waited."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(speaker, "_speaks", None)
    monkeypatch.setattr(speaker, "_claim", None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return seconds


@pytest.mark.parametrize(("problem", "code"), [(HexiError("no"), 2), (NothingFitsError("no"), 3)])
def test_a_mistake_is_one_line_and_an_exit_code(problem, code, waited, capsys):
    with pytest.raises(SystemExit) as ended, user_errors():
        raise problem
    assert ended.value.code == code
    assert capsys.readouterr().err == "hexi: error: no\n"
    assert not waited


@pytest.mark.parametrize(("size", "waits"), [("2", True), ("1", False)])
def test_under_torchrun_a_rank_gives_the_others_time_after_its_own_line(
    size, waits, waited, capsys, monkeypatch
):
    said = []
    monkeypatch.setattr(time, "sleep", lambda seconds: said.append((seconds, capsys.readouterr().err)))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", size), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit), user_errors():
        raise HexiError("no")
    if waits:
        assert [line for _, line in said] == ["hexi: error: [rank 1] no\n"]
        assert said[0][0] > 0
    else:
        assert not said


def test_what_is_not_the_users_mistake_keeps_its_traceback(waited):
    with pytest.raises(KeyError), user_errors():
        raise KeyError("ours")
    assert not waited


def ranks(script, count=3, **environment):
    """What each of some processes of one parent writes to standard error, one after the other in time."""
    shared = {key: value for key, value in os.environ.items() if key not in VARIABLES} | environment
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=shared | {"RANK": str(rank), "WORLD_SIZE": str(count)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [process.communicate(timeout=250)[1] for process in started]


SCRIPT = """
import time
from megatron_hexi.speaker import say_error
say_error("hexi: error: no")
time.sleep(2)  # as long as others may still ask
"""


@pytest.mark.parametrize(
    ("environment", "lines"),
    [({"TORCHELASTIC_RUN_ID": "none"}, 1), ({"SLURM_STEP_ID": "0"}, 1), ({}, 3)],
    ids=["torchrun", "srun", "neither"],
)
def test_of_the_ranks_of_a_launcher_one_speaks(environment, lines):
    said = "".join(ranks(SCRIPT, **environment))
    assert said == "hexi: error: no\n" * lines


def test_the_next_attempt_of_torchrun_has_a_speaker_of_its_own():
    for attempt in range(2):
        said = ranks(SCRIPT, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=str(attempt))
        assert "".join(said).count("\n") == 1


def test_torchrun_is_told_the_line(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setattr(speaker, "_speaks", True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert say_error("hexi: error: no")
    told = json.loads(file.read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "hexi: error: no"
    assert int(told["extraInfo"]["timestamp"]) > 0
