"""Whole numbers as people type them, and those of a launcher's variables."""

from __future__ import annotations

import pytest

from megatron_hexi.doctor.gather import find_job
from megatron_hexi.errors import HexiError
from megatron_hexi.platform.slurm import adopt_slurm_environment
from megatron_hexi.whole_number import variable_number, whole_number
from tests.support.shell import call_hexi, is_one_error_line

NO_NUMBERS = ["", "x", "\u0663", "1_0", " 1", "+1", "1.0", "0x1", "1\n", "9" * 5000, "nan"]
TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1,2,3"}
RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_only_digits_are_a_number(text):
    assert whole_number(text) is None
    with pytest.raises(HexiError, match=r"(?s)^N=.*: is no number from 0 to 2147483647; unset it"):
        variable_number({"N": text}, "N")


def test_numbers():
    assert [whole_number(text) for text in ("0", "007", "-3", "9" * 18)] == [0, 7, -3, 10**18 - 1]
    assert variable_number({}, "N", 3) == 3
    for text in ("1", "5", "-3"):
        with pytest.raises(HexiError, match=f"^N={text}: is no number from 2 to 4"):
            variable_number({"N": text}, "N", least=2, most=4)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["x", "-1", "99999999999"])
def test_a_launcher_s_variables_are_numbers(name, text):
    with pytest.raises(HexiError, match=f"^{name}={text}: is no number from 0 to"):
        adopt_slurm_environment(RANK | {name: text})


@pytest.mark.parametrize("name", [*TASK, "SLURM_JOB_ID"][:3])
def test_slurm_s_variables_are_numbers(name):
    hosts = {"SLURM_JOB_NODELIST": "h", "SLURM_JOB_ID": "5"}
    with pytest.raises(HexiError, match=r"=x: is no number from 0 to"):
        adopt_slurm_environment(TASK | hosts | {name: "x"})


@pytest.mark.parametrize(
    "wrong", [{"RANK": "4"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "99999"}, {"MASTER_PORT": "0"}]
)
def test_ranks_and_ports_that_there_cannot_be_are_refused(wrong):
    assert find_job(RANK) is not None
    with pytest.raises(HexiError, match="is no number from"):
        find_job(RANK | wrong)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        with pytest.raises(HexiError, match=f"^{name} is not set; start with torchrun or srun"):
            find_job({key: value for key, value in RANK.items() if key != name})


@pytest.mark.parametrize("words", [["probe", "-o", "c.yaml"], ["doctor"]])
@pytest.mark.parametrize("wrong", [{"WORLD_SIZE": "x"}, {"MASTER_PORT": "99999"}])
def test_commands_of_ranks_check_them(monkeypatch, capsys, tmp_path, words, wrong):
    monkeypatch.chdir(tmp_path)
    for name, value in (RANK | wrong).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tests.support.shell.pytest.MonkeyPatch.delenv", lambda *_, **__: None)
    done = call_hexi(monkeypatch, capsys, words)
    assert done.code == 2
    assert is_one_error_line(done.err)
    assert f"{next(iter(wrong))}={next(iter(wrong.values()))}: is no number" in done.err
