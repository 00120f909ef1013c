"""Compares the testbed with the cluster file: requested and measured figures, and their report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.testbed.lab import TOLERANCE, Lab, Speeds
from megatron_hexi.lab.testbed.network import LinkMeasured
from megatron_hexi.lab.testbed.quotas import cycle_seconds


class _Timed:
    """Requested and measured seconds of the same work."""

    asked_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Error of the speed, relative to the requested one."""
        return self.asked_s / self.measured_s - 1


@dataclass(frozen=True)
class SpeedMeasured(_Timed):
    """A measurement of one GPU's speed under the synthetic load.

    Args:
        asked_s: requested seconds of a cycle of the load. Paced: by the file. Quota: by the file's ratios
            of speeds, scaled to the measured mean speed of all GPUs.
    """

    gpu: int
    asked_s: float
    measured_s: float


@dataclass(frozen=True)
class PaceMeasured(_Timed):
    """A measurement of how well a rank of a paced job kept its pace.

    Args:
        measured_s: seconds that the operations took: modelled and lost ones.
        overrun: share of the modelled time by which operations computed longer than modelled.
        paced_share: share of the time from the first operation to the last in paced operations.
        unmodelled_share: share of that time in work between operations, which is not modelled.
        exposed_share: share of that time in unmodelled work that may have kept other ranks waiting.
        busy_share: share of the modelled time really computed; the rest is head-room.
    """

    gpu: int
    operations: int
    asked_s: float
    measured_s: float
    overrun: float
    paced_share: float
    unmodelled_share: float
    exposed_share: float
    busy_share: float


def read_speeds(lab: Lab, cluster: Cluster, job: str) -> list[SpeedMeasured]:
    """Read the speeds that the ranks printed at the end of a run of the synthetic load."""
    asked_s = [cycle_seconds(cluster.ranks[gpu].device) for gpu in lab.gpus]
    printed = [json.loads(lab.log(job, n).read_text().splitlines()[-1]) for n in range(len(asked_s))]
    measured_s = [cycles["seconds"] / cycles["cycles"] for cycles in printed]
    if lab.speeds == "quota":
        unit = sum(1 / seconds for seconds in asked_s) / sum(1 / seconds for seconds in measured_s)
        asked_s = [unit * seconds for seconds in asked_s]
    return [SpeedMeasured(*row) for row in zip(lab.gpus, asked_s, measured_s, strict=True)]


def read_pace(lab: Lab, records: Sequence[dict[str, Any] | None]) -> list[PaceMeasured]:
    """Return the pace of each rank of a paced job; without ranks that had no paced operation."""
    return [
        _pace(gpu, record["pace"])
        for gpu, record in zip(lab.gpus, records, strict=True)
        if record and record["pace"]["operations"]
    ]


def link_problems(cluster: Cluster, links: Sequence[LinkMeasured]) -> list[str]:
    """Return the errors of links that are off, one line each."""
    return [
        f"link from {cluster.rank_name(link.source)} to {cluster.rank_name(link.target)}: asked "
        f"{link.asked_gb_s:.4g} GB/s, measured {link.measured_gb_s:.4g} ({link.error:+.1%}); "
        "this machine is too busy, or cannot carry so much: lower the bandwidths of the file"
        for link in links
        if abs(link.error) > TOLERANCE
    ]


def speed_problems(cluster: Cluster, speeds: Sequence[SpeedMeasured], method: Speeds) -> list[str]:
    """Return the errors of speeds that are off under the synthetic load, one line each."""
    remedy = {
        "paced": "this machine is too slow or too busy: lower all curves of the file by one factor",
        "quota": "this machine is too busy: try again, or take --speeds paced",
        "none": "",
    }[method]
    return [
        f"GPU {speed.gpu} ({cluster.rank_name(speed.gpu)}): asked {1e3 * speed.asked_s:.4g} ms a cycle of "
        f"the load, measured {1e3 * speed.measured_s:.4g} (speed {speed.error:+.1%}); {remedy}"
        for speed in speeds
        if abs(speed.error) > TOLERANCE
    ]


def pace_problems(cluster: Cluster, paces: Sequence[PaceMeasured]) -> list[str]:
    """Return the errors of ranks of a job that did not keep their pace, one line each."""
    problems = []
    for pace in paces:
        who = f"GPU {pace.gpu} ({cluster.rank_name(pace.gpu)})"
        remedy = "lower all curves of the file by one factor, or take fewer ranks"
        if pace.overrun > TOLERANCE:
            problems.append(
                f"{who}: operations overran their modelled time by {pace.overrun:.1%} of it; {remedy}"
            )
        if abs(pace.error) > TOLERANCE:
            problems.append(
                f"{who}: asked {pace.asked_s:.4g} s of paced work, measured {pace.measured_s:.4g} "
                f"(speed {pace.error:+.1%}); {remedy}"
            )
    return problems


def _pace(gpu: int, pace: dict[str, Any]) -> PaceMeasured:
    modelled, wall = sum(pace["modelled"].values()), pace["wall"]
    return PaceMeasured(
        gpu=gpu,
        operations=pace["operations"],
        asked_s=modelled,
        measured_s=modelled + pace["lost"],
        overrun=pace["excess"] / modelled,
        paced_share=modelled / wall,
        unmodelled_share=pace["between"] / wall,
        exposed_share=pace["exposed"] / wall,
        busy_share=pace["computing"] / modelled,
    )


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
        parts.append(_pace_lines(document["pace"], names))
    if not document["links_emulated"]:
        parts.append(Text("links: NOT emulated"))
    return Group(*parts)


def _speeds(when: str, rows: list[dict[str, Any]], names: Mapping[int, str]) -> Table:
    table = _table(
        f"speeds {when}, under a synthetic load", ("GPU", "asked ms", "measured ms", "speed off by")
    )
    for row in rows:
        cells = (f"{1e3 * row['asked_s']:.2f}", f"{1e3 * row['measured_s']:.2f}", f"{row['error']:+.1%}")
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


def _pace_lines(rows: list[dict[str, Any]], names: Mapping[int, str]) -> Table:
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
