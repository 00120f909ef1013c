"""`python -m benchmarks.ablation`: what each mechanism of the planner is worth.

Each mechanism is removed alone, and fifty requests are planned without it: the cells of benchmarks.layouts,
fifteen with fixed sizes, six of kinds of layers, three of 128 GPUs and more with dead nodes, and three that
nothing fits. A cell changes where the iteration's predicted seconds
differ by 0.3 % or more. A mechanism that changes no cell and saves no planning time should go.

Seconds of planning are of the processor. Each plan is found in a process of its own; a plan that takes longer
than --limit is cut off, and neither side of its cell counts. Results are kept in --output as they come, and
what is kept there is not planned again.

example, two mechanisms on the cells of up to 16 GPUs:
  python -m benchmarks.ablation --gpus 16 --mechanisms polish waiting --output ablation.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import inf
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import megatron_hexi
from benchmarks.ablation.cells import Cell, all_cells
from benchmarks.ablation.mechanisms import MECHANISMS
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.text_file import write_text_atomically

#: Seconds that differ by less are the same.
CHANGED = 0.003
#: A mechanism saves time if planning without it takes longer by this part: less is noise.
SAVES = 0.03
#: Nothing is removed: by this name results of the whole planner are kept, and those of `hexi compare`.
WHOLE, WHOLE_COMPARE = "-", "- compare"


@dataclass(frozen=True)
class Result:
    """The result of planning a cell, with or without a mechanism.

    Args:
        seconds: of an iteration; ``None``: nothing fits, or planning was cut off.
        cpu_s: seconds of the processor that planning took.
        cut: whether it was cut off.
    """

    seconds: float | None
    cpu_s: float
    cut: bool = False


@dataclass(frozen=True)
class Row:
    """The worth of a mechanism, over the cells that were planned with and without it.

    Args:
        cells: how many these are.
        slower: cells whose plan is slower without it, with the part by which it is; infinite: none is found.
        faster: cells whose plan is faster without it, likewise.
        with_s: seconds of planning them with the mechanism.
        without_s: and without it.
        cut: cells that were cut off.
    """

    mechanism: str
    cells: int
    slower: dict[str, float]
    faster: dict[str, float]
    with_s: float
    without_s: float
    cut: int

    @property
    def verdict(self) -> str:
        """Whether the mechanism stays, as text."""
        if not self.cells:
            return "not run"
        if self.slower:
            return "stays"
        if self.without_s > self.with_s * (1 + SAVES):
            return "stays: saves time"
        return "should go"


def plan_cell(cell: Cell, name: str, limit_s: float) -> Result:
    """Plan a cell without a mechanism (`WHOLE`, `WHOLE_COMPARE`: with all of them)."""
    mechanism = MECHANISMS.get(name)
    compares = name == WHOLE_COMPARE if mechanism is None else mechanism.of_compare
    seconds = None
    begun, cut = time.process_time(), False
    signal.signal(signal.SIGPROF, _cut_off)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        with nullcontext() if mechanism is None else mechanism.removed():
            if compares:
                found, _ = find_baselines(cell.request, cell.cluster)
                seconds = min((one.trial.iteration_s for one in found if one.trial is not None), default=None)
            else:
                planned = find_plan(cell.request, cell.cluster)
                seconds = planned.cost.iteration_s
    except NothingFitsError:
        pass
    except _CutOffError:
        cut = True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Result(seconds, time.process_time() - begun, cut)


class _CutOffError(BaseException):
    """Planning took too long; the planner goes on after errors of other classes."""


def _cut_off(_signal: int, _frame: FrameType | None) -> None:
    raise _CutOffError("planning took longer than --limit")


class Kept:
    """Results by cell and mechanism, kept in a file.

    Args:
        path: the file; ``None``: results are not kept.

    Raises:
        HexiError: the file has results of other sources of the package.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._sources = path, sources_digest()
        self.results: dict[str, dict[str, Result]] = {}
        if path is None or not path.exists():
            return
        document = json.loads(path.read_text())
        if document["sources"] != self._sources:
            raise HexiError(f"{path}: has results of other sources of the package; give another --output")
        for cell, by_mechanism in document["results"].items():
            self.results[cell] = {name: Result(**result) for name, result in by_mechanism.items()}

    def add(self, cell: str, name: str, result: Result) -> None:
        """Keep a result."""
        self.results.setdefault(cell, {})[name] = result
        if self._path is not None:
            plain = {
                key: {one: asdict(result) for one, result in own.items()} for key, own in self.results.items()
            }
            text = json.dumps({"sources": self._sources, "results": plain}, indent=1)
            write_text_atomically(self._path, text + "\n")


def sources_digest() -> str:
    """Return a digest of the package's sources, on which all results depend."""
    folder = Path(megatron_hexi.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def row_of(name: str, results: Mapping[str, Mapping[str, Result]]) -> Row:
    """Return what a mechanism is worth by the results of all cells."""
    whole = WHOLE_COMPARE if MECHANISMS[name].of_compare else WHOLE
    both = {cell: (own[whole], own[name]) for cell, own in results.items() if whole in own and name in own}
    fair = {cell: pair for cell, pair in both.items() if not any(result.cut for result in pair)}
    longer = {cell: _longer(*pair) for cell, pair in fair.items()}
    return Row(
        mechanism=name,
        cells=len(fair),
        slower={cell: part for cell, part in longer.items() if part >= CHANGED},
        faster={cell: part for cell, part in longer.items() if part <= -CHANGED},
        with_s=sum(before.cpu_s for before, _ in fair.values()),
        without_s=sum(after.cpu_s for _, after in fair.values()),
        cut=len(both) - len(fair),
    )


def _longer(before: Result, after: Result) -> float:
    """Return by what part an iteration is longer without a mechanism; infinite: nothing fits without."""
    if before.seconds is None:
        return 0.0 if after.seconds is None else -inf
    if after.seconds is None:
        return inf
    return after.seconds / before.seconds - 1


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    head = "| removed | cells | slower | faster | planning with, s | without, s | verdict |"
    lines = [head, "|---|---:|---|---|---:|---:|---|"]
    for row in rows:
        if not row.cells:
            lines.append(f"| {row.mechanism} | 0 | | | | | not run |")
            continue
        lines.append(
            f"| {row.mechanism} | {row.cells} | {_spell(row.slower)} | {_spell(row.faster)} "
            f"| {row.with_s:.0f} | {row.without_s:.0f} | {row.verdict} |"
        )
    return "\n".join(lines)


def _spell(changed: Mapping[str, float]) -> str:
    if not changed:
        return "0"
    parts = sorted(abs(part) for part in changed.values())
    most = f"{parts[0]:.1%}" if len(parts) == 1 else f"{parts[0]:.1%} to {parts[-1]:.1%}"
    return f"{len(parts)}, by {most}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = "only cells of this kind, or whose name has this text"
    parser.add_argument("--cells", nargs="+", default=[""], metavar="TEXT", help=named)
    parser.add_argument("--gpus", type=int, default=10**9, metavar="N", help="only cells of at most N GPUs")
    listed = f"only these of {', '.join(MECHANISMS)}"
    parser.add_argument(
        "--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS), metavar="NAME", help=listed
    )
    parser.add_argument(
        "--limit", type=float, default=600, metavar="S", help="seconds of a plan; default 600"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file that keeps results")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, not as a table")
    given = parser.parse_args(words)
    cells = [
        cell
        for cell in all_cells()
        if len(cell.cluster.ranks) <= given.gpus
        and any(text == cell.kind or text in cell.name for text in given.cells)
    ]
    if not cells:
        parser.error("no such cell; names are: " + "; ".join(cell.name for cell in all_cells()))
    try:
        kept = Kept(given.output)
    except HexiError as problem:
        parser.error(str(problem))
    for cell in cells:
        whole = {WHOLE_COMPARE if MECHANISMS[name].of_compare else WHOLE for name in given.mechanisms}
        for name in (*sorted(whole), *given.mechanisms):
            own = kept.results.get(cell.name, {})
            cut = [one for one in whole if one in own and own[one].cut]
            if name in own or (name not in whole and cut):
                continue
            with ProcessPoolExecutor(1, get_context("fork")) as pool:
                result = pool.submit(plan_cell, cell, name, given.limit).result()
            kept.add(cell.name, name, result)
            print(f"{cell.name}, without {name}: {_told(result)}", file=sys.stderr, flush=True)
    chosen = {cell.name for cell in cells}
    rows = [
        row_of(name, {cell: own for cell, own in kept.results.items() if cell in chosen})
        for name in given.mechanisms
    ]
    if given.json:
        print(json.dumps([asdict(row) | {"verdict": row.verdict} for row in rows], indent=1))
    else:
        print(table(rows))
    return 0


def _told(result: Result) -> str:
    if result.cut:
        return f"cut off after {result.cpu_s:.1f} s"
    found = "nothing fits" if result.seconds is None else f"{result.seconds:.6g} s an iteration"
    return f"{found}, planned in {result.cpu_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
