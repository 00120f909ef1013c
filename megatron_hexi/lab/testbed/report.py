"""The report of a testbed's measurements, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def testbed_report(document: Mapping[str, Any]) -> RenderableType:
    """Return tables of speeds and links, requested and measured, and of how a paced job kept its pace."""
    parts: list[RenderableType] = [Text(document["method"])]
    names = {row["gpu"]: row["name"] for row in document["gpus"]}
    for when, measured in document["measured"].items():
        if measured["speeds"]:
            parts.append(_speeds(when, measured["speeds"], names))
        if measured["links"]:
            parts.append(_links(when, measured["links"], names))
    if document["pace"]:
        parts.append(_pace(document["pace"], names))
    if not document["links_emulated"]:
        parts.append(Text("links: NOT emulated"))
    return Group(*parts)


def _speeds(when: str, rows: list[dict[str, Any]], names: Mapping[int, str]) -> Table:
    table = _table(
        f"speeds {when}, under a synthetic load", ("GPU", "asked ms", "measured ms", "speed off by")
    )
    for row in rows:
        cells = (
            f"{1e3 * row['asked_s']:.2f}",
            f"{1e3 * row['measured_s']:.2f}",
            f"{row['error']:+.1%}",
        )
        table.add_row(_who(row["gpu"], names), *cells)
    return table


def _links(when: str, rows: list[dict[str, Any]], names: Mapping[int, str]) -> Table:
    columns = ("from", "to", "asked MB/s", "measured MB/s", "off by", "file's µs", "measured µs")
    table = _table(f"links {when} (latency is not emulated)", columns)
    for row in rows:
        cells = (
            f"{1e3 * row['asked_gb_s']:.2f}",
            f"{1e3 * row['measured_gb_s']:.2f}",
            f"{row['error']:+.1%}",
            f"{row['file_latency_us']:.0f}",
            f"{row['measured_latency_us']:.0f}",
        )
        table.add_row(_who(row["source"], names), _who(row["target"], names), *cells)
    return table


def _pace(rows: list[dict[str, Any]], names: Mapping[int, str]) -> Table:
    shares = {
        "overrun": "overrun",
        "computing": "busy_share",
        "paced": "paced_share",
        "unmodelled": "unmodelled_share",
        "exposed": "exposed_share",
    }
    table = _table("pace of the job", ("GPU", "asked s", "measured s", "speed off by", *shares))
    table.caption = (
        "overrun, computing: of the modelled time; paced, unmodelled, and at most so much of that exposed\n"
        "to other ranks: of the job's time"
    )
    for row in rows:
        table.add_row(
            _who(row["gpu"], names),
            f"{row['asked_s']:.3f}",
            f"{row['measured_s']:.3f}",
            f"{row['error']:+.1%}",
            *(f"{row[field]:.1%}" for field in shares.values()),
        )
    return table


def _who(gpu: int, names: Mapping[int, str]) -> str:
    return f"{gpu} {names[gpu]}"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("GPU", "from", "to") else "right")
    return table
