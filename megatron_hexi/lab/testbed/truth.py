"""Compares the testbed with the cluster file: requested and measured figures, and those that are off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.testbed.lab import TOLERANCE, Lab, Speeds
from megatron_hexi.lab.testbed.links import LinkMeasured
from megatron_hexi.lab.testbed.quotas import cycle_seconds


@dataclass(frozen=True)
class SpeedMeasured:
    """A measurement of one GPU's speed under the synthetic load.

    Args:
        asked_s: time of a cycle of the load. Paced: by the file. Quota: in the file's ratios, with the mean
            speed of all as it was measured.
        measured_s: measured seconds of a cycle.
    """

    gpu: int
    asked_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Error of the speed, relative to the requested one."""
        return self.asked_s / self.measured_s - 1


@dataclass(frozen=True)
class PaceMeasured:
    """A measurement of how well a rank of a paced job kept its pace.

    Args:
        asked_s: modelled seconds of these operations.
        measured_s: seconds that they took: modelled, and lost.
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

    @property
    def error(self) -> float:
        """Error of the speed, relative to the requested one."""
        return self.asked_s / self.measured_s - 1


def read_speeds(lab: Lab, cluster: Cluster, job: str) -> list[SpeedMeasured]:
    """Read the speeds that the ranks printed at the end of a run of the synthetic load."""
    asked_s = [cycle_seconds(cluster.ranks[gpu].device) for gpu in lab.gpus]
    measured_s = [_seconds_a_cycle(lab.log(job, rank)) for rank in range(len(asked_s))]
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


def _seconds_a_cycle(log: Path) -> float:
    printed = json.loads(log.read_text().splitlines()[-1])
    return float(printed["seconds"] / printed["cycles"])
