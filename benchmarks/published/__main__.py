"""`python -m benchmarks.published`: the tables that others published, beside what the cost model predicts.

Errors are predicted over published, less one, in the unit of the row. With --page it writes
docs/results/published.md with its picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.published.orders import orders
from benchmarks.published.page import write_page
from benchmarks.published.picture import draw
from benchmarks.published.predict import Comparison, compare
from benchmarks.published.summary import by_sort, errors
from benchmarks.published.tables import tables
from benchmarks.published.variants import VARIANTS, changed, time_errors

PAGE = Path(__file__).parents[2] / "docs" / "results"


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    options = _parser().parse_args(words)
    results = {table.name: compare(table) for table in tables()}
    if options.picture:
        draw(results).savefig(options.picture, dpi=150)
    if options.page:
        write_page(results, options.page)
    if options.json:
        rows = [asdict(row) | {"error": row.error} for own in results.values() for row in own]
        print(json.dumps(rows, indent=1))
    else:
        _print(results)
    return 0


def _print(results: Mapping[str, Sequence[Comparison]]) -> None:
    for table in tables():
        print(table.title)
        for row in results[table.name]:
            numbers = f"{row.published:10,.4g} {row.predicted:10,.4g}"
            print(f"  {row.row:44} {numbers} {row.unit:15} {row.error:+7.1%}")
    for what in ("time", "memory"):
        found = errors([row for rows in results.values() for row in rows if row.what == what])
        print(f"{what}, {found}")
    for sort, found in by_sort([row for rows in results.values() for row in rows]):
        print(f"{sort}, {found}")
    for order in (order for rows in results.values() for order in orders(rows)):
        found_order = f"rank correlation {order.correlation:+.2f}, the choice costs {order.regret:.1%}"
        print(f"{order.table}, {order.job}: {found_order}")
    for variant in VARIANTS:
        then = " ".join(f"{error:+.0%}" for error in time_errors(changed(variant)))
        print(f"{variant.table}, {variant.text}: {then}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--picture", type=Path, metavar="OUT.png", help="draw the errors")
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=PAGE,
        metavar="FOLDER",
        help="write the page and its picture (default docs/results)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
