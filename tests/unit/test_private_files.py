"""Files that say more than a plan does are their owner's only; what is there already keeps its mode."""

from __future__ import annotations

import stat

import pytest

from megatron_hexi.record import append_to_record, open_record
from megatron_hexi.text_file import append_line, write_text_atomically
from tests.support.records import interval, start


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["record", "appended", "metrics", "page"])
def write(request):
    """One way in which such a file is written."""

    def metrics(path):
        append_line(path, "{}")

    def record(path):
        open_record(path)
        append_to_record(path, start())

    def appended(path):
        append_to_record(path, interval(1))

    def page(path):
        write_text_atomically(path, "page", private=True)

    return {"record": record, "appended": appended, "metrics": metrics, "page": page}[request.param]


def test_a_new_file_is_its_owner_s(write, tmp_path):
    write(tmp_path / "file")
    assert mode(tmp_path / "file") == 0o600


def test_a_file_that_is_there_keeps_its_mode(write, tmp_path):
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o640)
    write(path)
    assert mode(path) == 0o640
