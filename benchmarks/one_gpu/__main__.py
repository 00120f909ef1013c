"""`python -m benchmarks.one_gpu`: measures on one GPU whatever one GPU can show, most worth first.

Each part is bounded in seconds, writes what it measured line by line, and does not keep the others from
running where it fails. `--dry-run` runs the same code with tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.one_gpu import cells, correctness, mixed, pieces, sweep
from benchmarks.one_gpu.page import tables
from benchmarks.one_gpu.parts import Part, Setting, run_parts
from megatron_hexi.errors import user_errors

PARTS = (
    Part("tests", "uneven training with Transformer Engine's layers against one rank", 150, correctness.run),
    Part("training", "Llama 3 8B layers without a plan and under one", 200, cells.run),
    Part("mixed", "a mixed cluster by unequal parts of the GPU", 240, mixed.run),
    Part("sweep", "products, grouped products and attention by their sizes", 60, sweep.run),
    Part("pieces", "copies, sums and blocks of attention", 40, pieces.run),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0, or 1 where a part failed.
    """
    options = _parser().parse_args(words)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="hexi-one-gpu-"))
    limits = dict(options.limit)
    chosen = [
        replace(part, seconds=limits.get(part.name, part.seconds))
        for part in PARTS
        if part.name in (options.parts or [part.name])
    ]
    with user_errors():
        print(f"logs in {folder}", file=sys.stderr)
        setting = Setting(options.gpu, folder.resolve(), options.dry_run, tuple(options.cells))
        run = run_parts(chosen, setting, options.output)
        if not options.dry_run:
            print(tables(run))
    return int(any(part["failed"] for part in run["parts"].values()))


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    names = [part.name for part in PARTS]
    if name not in names:
        raise argparse.ArgumentTypeError(f"no part is called {name}; there are {', '.join(names)}")
    return name, float(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__)
    name, names = "H100-SXM-80GB", [part.name for part in PARTS]
    parser.add_argument("--gpu", default=name, help="the catalogue's name of the GPU (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=names, help="some of them (default: all)")
    parser.add_argument(
        "--limit", nargs="+", type=_limit, default=[], metavar="PART=SECONDS", help="instead of a part's own"
    )
    parser.add_argument("--cells", type=int, nargs="+", default=[], metavar="N", help="trainings, from 0")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--output", "-o", type=Path, metavar="OUT.json", help="write what is measured")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for logs and files (default: a new one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
