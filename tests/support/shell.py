"""The command `hexi`, called in this process as a shell would call it."""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import pytest
from typer.main import get_command

from megatron_hexi.cli.main import main

#: Building all commands takes longer than most calls do; a process has the same ones throughout.
_command = functools.cache(get_command)


class Result(NamedTuple):
    """What a call came to."""

    code: int
    out: str
    err: str


def call_hexi(monkeypatch, capsys, words) -> Result:
    """``hexi WORDS…``."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("megatron_hexi.cli.main.get_command", _command)
    monkeypatch.setattr(sys, "argv", ["hexi", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    code = exit_.value.code or 0  # None is success to Python
    assert isinstance(code, int)
    return Result(code, captured.out, captured.err)


def is_one_error_line(text: str) -> bool:
    """Whether that is all that a refusal may print."""
    return text.startswith("hexi: error: ") and text.count("\n") == 1 and text.endswith("\n")
