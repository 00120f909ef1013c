"""docs/results/published.md, from the comparisons alone; what explains them is in words.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.published.picture import draw
from benchmarks.published.predict import Comparison, misfit
from benchmarks.published.summary import errors
from benchmarks.published.tables import tables
from benchmarks.published.variants import VARIANTS, changed, time_errors
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import read_yaml

WORDS = Path(__file__).parent / "words.yaml"
#: What is left of their time is not explained: see words.yaml.
_UNEXPLAINED = ("torchtitan-8b", "torchtitan-405b")


def write_page(results: Mapping[str, Sequence[Comparison]], folder: Path) -> None:
    """Write published.md and published/errors.png.

    Args:
        results: by table.
        folder: where to.
    """
    (folder / "published").mkdir(parents=True, exist_ok=True)
    draw(results).savefig(folder / "published" / "errors.png", dpi=150)
    text = "\n\n".join(_parts(results, read_yaml(WORDS).data))
    write_text_atomically(folder / "published.md", text + "\n")


def _parts(results: Mapping[str, Sequence[Comparison]], words: Mapping[str, str]) -> Iterator[str]:
    yield "# Published figures"
    yield "**Simulated, beside figures that others measured on GPUs.**"
    yield words["introduction"].strip()
    yield "\n".join(_bounds(results))
    yield "![Error of each row](published/errors.png)"
    yield "\n".join(_overview(results))
    yield "## How rows are compared"
    yield words["comparison"].strip()
    for table in tables():
        yield f"## {table.title}"
        yield f"Source: {table.source}. Assumed: {table.assumed}."
        yield "\n".join(_rows(results[table.name]))
        yield f"**Remaining error.** {words[table.name].strip()}"
    yield "## What each assumption is worth"
    yield "Errors of time, row by row."
    yield "\n".join(_variants())
    yield "## What does not fit"
    yield words["memory"].strip()
    yield "\n".join(_misfits())
    yield "## What bounds it"
    yield words["bounds"].strip()


def _bounds(results: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    for what in ("time", "memory"):
        every = errors([row for rows in results.values() for row in rows if row.what == what])
        most = errors(
            [
                row
                for name, rows in results.items()
                for row in rows
                if row.what == what and name not in _UNEXPLAINED
            ]
        )
        yield (
            f"- {what}, {every.rows} rows: median {every.median:.1%}, worst {every.worst:.1%}; without "
            f"torchtitan's {every.rows - most.rows}: median {most.median:.1%}, worst {most.worst:.1%}"
        )


def _overview(results: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    yield "| table | rows | median error | worst | mean, with signs | memory: median | worst |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for table in tables():
        time = errors([row for row in results[table.name] if row.what == "time"])
        held = [row for row in results[table.name] if row.what == "memory"]
        memory = f"{errors(held).median:.1%} | {errors(held).worst:.1%}" if held else "|"
        numbers = f"{time.rows} | {time.median:.1%} | {time.worst:.1%} | {time.mean:+.1%}"
        yield f"| {table.title} | {numbers} | {memory} |"


def _rows(rows: Sequence[Comparison]) -> Iterator[str]:
    """A line for each run: its time, and its memory where that was published too.

    Runs that are a grid, named ``layout, 8 GPUs``, are a table with a column for each number of GPUs.
    """
    grid: dict[str, dict[str, Comparison]] = {}
    for row in rows:
        name, _, column = row.row.rpartition(", ")
        grid.setdefault(name, {})[column] = row
    columns = list(next(iter(grid.values())))
    if len(grid) > 1 and len(columns) > 1 and all(list(cells) == columns for cells in grid.values()):
        yield f"| {rows[0].unit}: published, predicted, error | {' | '.join(columns)} |"
        yield "|---|" + "---|" * len(columns)
        for name, cells in grid.items():
            yield f"| {name} | {' | '.join(_figures(row).replace(' |', ',') for row in cells.values())} |"
        return
    runs: dict[str, list[list[Comparison]]] = {}
    for row in rows:  # tables may have two runs of one name
        of_name = runs.setdefault(row.row, [])
        if not of_name or row.what in (one.what for one in of_name[-1]):
            of_name.append([])
        of_name[-1].append(row)
    units = list(dict.fromkeys(row.unit for row in rows))
    yield "| row | " + " | ".join(f"{unit}: published | predicted | error" for unit in units) + " |"
    yield "|---|" + "---:|---:|---:|" * len(units)
    for run in (run for of_name in runs.values() for run in of_name):
        by_unit = {row.unit: row for row in run}
        figures = (_figures(by_unit[unit]) if unit in by_unit else "| |" for unit in units)
        yield f"| {run[0].row} | {' | '.join(figures)} |"


def _figures(row: Comparison) -> str:
    return f"{_number(row.published)} | {_number(row.predicted)} | {row.error:+.1%}"


def _variants() -> Iterator[str]:
    yield "| table | as assumed | otherwise | errors then |"
    yield "|---|---|---|---|"
    for variant in VARIANTS:
        then = changed(variant)
        (now,) = (table for table in tables() if table.name == variant.table)
        before, after = (" ".join(f"{error:+.0%}" for error in time_errors(one)) for one in (now, then))
        yield f"| {now.name} | {before} | {variant.text} | {after} |"


def _misfits() -> Iterator[str]:
    yield "| table | row | needs, GiB | usable, GiB |"
    yield "|---|---|---:|---:|"
    for table in tables():
        for row in table.rows if table.kind == "training" else ():
            found = misfit(table, row)
            if found is not None:
                yield f"| {found.table} | {found.row} | {found.needed:.1f} | {found.usable:.1f} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
