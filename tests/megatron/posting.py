"""Our entry point, which also keeps what the rank posted, in a file of its own in the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import TypeAdapter

from tests.support.nccl_rules import Call
from tests.support.posted import Posting

_CALLS = TypeAdapter(list[Call])
#: First argument of a run in which ranks do not compare shapes.
UNCHECKED = "--unchecked-shapes"


def main() -> None:
    """Train, and write the file."""
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.runtime import attention

    if UNCHECKED in sys.argv:
        sys.argv.remove(UNCHECKED)
        attention.agree_on_shapes = lambda *anything: None  # type: ignore[attr-defined]
    posting = Posting()
    try:
        with posting:
            pretrain_gpt.main()
    finally:
        _file(Path(), int(os.environ["RANK"])).write_bytes(_CALLS.dump_json(posting.calls))


def posted(folder: Path, ranks: int) -> list[list[Call]]:
    """What the ranks of a run in a folder posted."""
    return [_CALLS.validate_json(_file(folder, rank).read_bytes()) for rank in range(ranks)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"posted-{rank}.json"
