"""The record of a run as a file: what is appended is read; what is not whole, or not ours, is named."""

import json
import os
import subprocess
import sys

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.record import Leg, append_to_record, open_record, read_record
from tests.support.records import interval, start, write_record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_what_was_appended_is_read(path):
    first, again = start(), start(started="2026-01-03T00:00:00+00:00")
    pieces = interval(1), interval(2, 3), interval(3, 4, losses=[1.0, None])
    write_record(path, first, *pieces[:2], again, pieces[2])
    record = read_record(path)
    assert record.legs == (Leg(first, pieces[:2]), Leg(again, pieces[2:]))
    assert path.read_text().count("\n") == 5


def test_busy_is_what_waiting_leaves():
    told = interval(1, seconds=2.0, waits=(0.5, 3.0))
    assert told.ranks.busy_s == (1.25, 0.0)
    assert told.ranks.idle_shares == (0.375, 1.625)
    assert told.ranks.idle_share == 1.0
    assert told.tokens_per_s == 4096


def test_losses_keep_all_digits_and_seconds_a_microsecond(path):
    write_record(path, start(), interval(1, seconds=1.23456789, losses=[0.12345678901234]))
    (found,) = read_record(path).legs[0].intervals
    assert (found.seconds, found.losses) == ((1.234568,), (0.12345678901234,))


def test_a_job_that_goes_on_cuts_off_what_a_killed_one_left(path):
    write_record(path, start(), interval(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    open_record(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole[:7])  # killed in its very first line
    open_record(path)
    assert path.read_bytes() == b""


def test_a_folder_that_is_not_there_is_refused_as_by_every_command(tmp_path):
    with pytest.raises(HexiError, match=r"the folder .*new is not there; make it first"):
        open_record(tmp_path / "new" / "record.jsonl")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["notes of mine", '{"iteration": 1}\n', "\n"])
def test_another_file_is_left_alone(path, text):
    path.write_text(text)
    with pytest.raises(HexiError, match=r"begins with .*, no record; give --hexi-record another file"):
        open_record(path)
    assert path.read_text() == text


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HexiError, match="pipe: is a FIFO, no regular file; choose another name"):
        open_record(tmp_path / "pipe")
    with pytest.raises(HexiError, match="is a folder; give the name of a file in it"):
        open_record(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HexiError, match=r"cannot be written \(Not a directory\); choose another name"):
        open_record(tmp_path / "file" / "record.jsonl")


def test_a_full_disk_leaves_whole_lines(path):
    """A file may grow by some bytes only: the line that does not fit is not there at all."""
    write_record(path, start(), interval(1))
    whole = path.read_bytes()
    program = f"""
import resource, signal
from pathlib import Path
from megatron_hexi.errors import HexiError
from megatron_hexi.record import append_to_record
from tests.support.records import interval
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(whole) + 100},) * 2)
try:
    append_to_record(Path({str(path)!r}), interval(2))
except HexiError as problem:
    print(problem)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True
    )
    assert "cannot be written (no space for a whole line); check the disk and its folder" in said.stdout
    assert path.read_bytes() == whole


def test_a_missing_record_is_named(path):
    with pytest.raises(HexiError, match=r"record.jsonl: cannot be read \(No such file or directory\); give"):
        read_record(path)


def test_a_line_that_was_cut_off_is_named(path):
    write_record(path, start(), interval(1), interval(2))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(HexiError, match=r"record.jsonl:3: cut off in the middle of a line; delete it"):
        read_record(path)


@pytest.mark.parametrize("entries", [(), (start(),)], ids=["empty", "started"])
def test_a_record_without_iterations_is_named(path, entries):
    path.touch()
    write_record(path, *entries)
    with pytest.raises(HexiError, match=r"holds no iteration yet; let the run go on"):
        read_record(path)


def test_a_record_without_its_beginning_is_named(path):
    write_record(path, interval(1))
    with pytest.raises(HexiError, match=r"record.jsonl:1: no start of a run before"):
        read_record(path)


def _changed(path, line, change):
    """The record with one of its lines changed."""
    lines = path.read_text().splitlines()
    data = json.loads(lines[line - 1])
    change(data)
    lines[line - 1] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (1, lambda data: data["start"].pop("digest"), "record.jsonl:1: start.digest is missing; add it"),
        (1, lambda data: data["start"].update(version=2), "start.version is 2, this megatron-hexi reads 1"),
        (1, lambda data: data["start"].update(colour="red"), "start.colour is not a known field"),
        (
            2,
            lambda data: data["interval"].update(tokens=0),
            "interval.tokens = 0 is too small; the least is 1",
        ),
        (2, lambda data: data["interval"].update(iterations=[]), "interval.iterations = [] is empty"),
        (
            2,
            lambda data: data["interval"]["seconds"].append(1),
            "interval.seconds has 2 values, there should be 1",
        ),
        (
            2,
            lambda data: data["interval"]["ranks"]["step_s"].pop(),
            "interval.ranks.step_s has 1 values, there should be 2",
        ),
        (
            2,
            lambda data: data["interval"]["ranks"].update(attention_s=[float("nan"), 1]),
            "interval.ranks.attention_s[0] = nan is not finite",
        ),
        (2, lambda data: data.update(more=1), "is not a line of a run's record"),
    ],
)
def test_what_is_wrong_in_a_line_is_named(path, line, change, said):
    write_record(path, start(), interval(1))
    _changed(path, line, change)
    with pytest.raises(HexiError) as problem:
        read_record(path)
    assert said in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("text", ["no JSON\n", "[1]\n", "[" * 100_000 + "\n", '{"other": {}}\n'])
def test_no_record_at_all_is_named(path, text):
    path.write_text(text)
    with pytest.raises(HexiError, match=r"record.jsonl:1: .* is not a line of a run's record; give what"):
        read_record(path)


def test_no_text_is_named(path):
    path.write_bytes(os.urandom(100) + b"\xff\xfe")
    with pytest.raises(HexiError, match="not text"):
        read_record(path)


def test_a_record_that_cannot_be_appended_to_is_named(tmp_path):
    with pytest.raises(HexiError, match=r"cannot be written \(No such file or directory\)"):
        append_to_record(tmp_path / "gone" / "record.jsonl", start())


def test_a_device_that_changes_a_terminal_is_named(path):
    write_record(path, start(devices=("GPU", "G\x1b[31mPU\x07")), interval(1))
    with pytest.raises(HexiError, match=r"record.jsonl:1: start.devices\[1\] = .* cannot be printed; leave"):
        read_record(path)
