"""A user's mistake: one line, its exit code, and time for other ranks where torchrun would end them."""

import time

import pytest

from megatron_hexi.errors import HexiError, NothingFitsError, user_errors


@pytest.fixture
def waited(monkeypatch):
    """How long each of the mistakes made here waited."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
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
