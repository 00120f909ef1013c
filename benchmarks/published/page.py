"""docs/results/published.md, from the comparisons alone; what explains them is in words.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from textwrap import fill

from benchmarks.published.orders import orders
from benchmarks.published.picture import draw
from benchmarks.published.predict import Comparison, misfit
from benchmarks.published.summary import by_sort, errors
from benchmarks.published.tables import left_out, tables
from benchmarks.published.variants import VARIANTS, changed, time_errors
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import read_yaml

WORDS = Path(__file__).parent / "words.yaml"


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
    yield "## Order of layouts"
    yield words["orders"].strip()
    yield "\n".join(_orders(results))
    yield "## How rows are compared"
    yield words["comparison"].strip()
    yield "## Sources, assumptions and errors"
    for table in tables():
        url, _, place = table.source.partition(" ")
        source = f"[{table.title}]({url}){place and ' '}{place}"
        yield _wrapped(f"**{table.name}.** {source}. Assumed: {table.assumed}. {words[table.name]}")
    yield "## What each assumption is worth"
    yield "\n".join(_variants())
    yield "## Limits"
    yield words["bounds"].strip()
    yield "\n".join(_left_out())
    yield words["memory"].strip()
    yield "\n".join(_misfits())


def _wrapped(text: str) -> str:
    return fill(text, 140, break_long_words=False, break_on_hyphens=False)


def _bounds(results: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    for what in ("time", "memory"):
        every = [row for rows in results.values() for row in rows if row.what == what]
        yield f"- {what}, {errors(every)}"
        for group in dict.fromkeys(table.group for table in tables()):
            names = {table.name for table in tables() if table.group == group}
            own = [row for row in every if row.table in names]
            if own and what == "time":
                yield f"  - {group}, {errors(own)}"
        if what == "time":
            yield "- training by sort:"
            yield from (f"  - {sort}, {found}" for sort, found in by_sort(every))
    regrets = [order.regret for rows in results.values() for order in orders(rows)]
    yield (
        f"- the model's choice of layout, {len(regrets)} jobs: takes {median(regrets):.1%} longer than the "
        f"fastest published in the median, {max(regrets):.1%} at worst"
    )


def _orders(results: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    """A line for each job with three layouts or more."""
    yield "| table | job | layouts | rank correlation | the model's first | costs |"
    yield "|---|---|---:|---:|---|---:|"
    for order in (order for rows in results.values() for order in orders(rows)):
        yield (
            f"| {order.table} | {order.job} | {order.layouts} | {order.correlation:+.2f} | {order.first} | "
            f"{order.regret:+.1%} |"
        )


def _left_out() -> Iterator[str]:
    for rows in left_out():
        yield f"- {rows.rows} of [{rows.source}]({rows.url}), {rows.models}: {rows.reason}"


def _overview(results: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    """A line for each table and unit, with its worst row."""
    yield "| table | year | rows | median error | worst | published | predicted | in row |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for table in tables():
        for unit in dict.fromkeys(row.unit for row in results[table.name]):
            rows = [row for row in results[table.name] if row.unit == unit]
            found, worst = errors(rows), max(rows, key=lambda row: abs(row.error))
            sizes = f"{len(rows)} | {found.median:.1%} | {worst.error:+.1%}"
            figures = " | ".join(_number(value) for value in (worst.published, worst.predicted))
            name = f"{table.name}, {unit.removesuffix(' a GPU')}"
            yield f"| {name} | {table.year} | {sizes} | {figures} | {worst.row} |"


def _variants() -> Iterator[str]:
    yield "Mean error with its sign, as assumed → otherwise:\n"
    for text in dict.fromkeys(variant.text for variant in VARIANTS):
        found = []
        for variant in (one for one in VARIANTS if one.text == text):
            (now,) = (table for table in tables() if table.name == variant.table)
            before, then = (fmean(time_errors(table)) for table in (now, changed(variant)))
            found.append(f"{now.name} {before:+.0%}→{then:+.0%}")
        yield f"- {text}: {', '.join(found)}"


def _misfits() -> Iterator[str]:
    for table in tables():
        for row in table.rows if table.kind == "training" else ():
            found = misfit(table, row)
            if found is not None:
                yield f"- {found.table}, {found.row}: {found.needed:.1f} of {found.usable:.1f} GiB"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
