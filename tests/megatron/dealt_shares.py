"""Our entry point, which also keeps the shares of each micro-batch, in a file of each rank in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, and write the file."""
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.megatron import packing
    from megatron_hexi.megatron.session import active_session
    from megatron_hexi.plan import Mask

    kept: list[tuple[int, int]] = []
    shard = packing.PackedShard

    def keeping(documents: tuple[int, ...], *parts: Any) -> packing.PackedShard:
        session = active_session()
        assert session is not None
        schedule = session.attention.schedules(Mask(documents=documents))
        first, stop = schedule.heads[schedule.position]
        kept.append((schedule.tokens, stop - first))
        return shard(documents, *parts)

    packing.PackedShard = keeping  # type: ignore[assignment, misc]
    pretrain_gpt.main()
    Path(f"shares-{os.environ['RANK']}.json").write_text(json.dumps(kept))


def shares_of(folder: Path, ranks: int) -> list[list[tuple[int, int]]]:
    """Tokens and heads of each rank in each micro-batch that it met."""
    files = [folder / f"shares-{rank}.json" for rank in range(ranks)]
    return [[(tokens, heads) for tokens, heads in json.loads(file.read_text())] for file in files]
