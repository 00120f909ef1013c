"""The request of the command to the lab (with throttled GPUs) as a file, and the paths of all files there."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import write_text_atomically

_SPELLING = re.compile(
    r"(?P<gpu>\d{1,5})=(?P<factor>\d*\.?\d+)@(?P<begin>\d+(\.\d+)?)\.\.(?P<end>\d+(\.\d+)?)?"
)


@dataclass(frozen=True)
class Throttle:
    """A GPU at another speed for some time.

    Args:
        begin_s: begin, s after the rank's first paced operation.
        end_s: end, s after that; ``None``: until the job ends.
    """

    gpu: int
    factor: float
    begin_s: float
    end_s: float | None = None

    def holds(self, seconds: float) -> bool:
        """Return whether the throttle is active, by seconds since the first paced operation."""
        return self.begin_s <= seconds and (self.end_s is None or seconds < self.end_s)


def parse_throttle(text: str, gpus: int) -> Throttle:
    """Parse a throttle: ``2=0.5@60..180`` is GPU 2 at half its speed from second 60 to 180."""
    match = _SPELLING.fullmatch(text)
    if match is not None:
        begin, end = float(match["begin"]), match["end"]
        throttle = Throttle(int(match["gpu"]), float(match["factor"]), begin, float(end) if end else None)
        later = throttle.end_s is None or throttle.end_s > throttle.begin_s
        if throttle.gpu < gpus and 0 < throttle.factor <= 1 and later:
            return throttle
    raise HexiError(
        f"--throttle {text[:40]}: write GPU=SPEED@BEGIN..END, a GPU from 0 to {gpus - 1}, a part of its "
        "speed, and seconds of the job: 2=0.5@60..180, or 2=0.5@60.. until it ends"
    )


def speed_at(throttles: Iterable[Throttle], seconds: float) -> float:
    """Return the factor on a GPU's curves at a time, given its throttles."""
    return math.prod((throttle.factor for throttle in throttles if throttle.holds(seconds)), start=1.0)


Speeds = Literal["paced", "quota", "none"]
SPEEDS: tuple[Speeds, ...] = ("paced", "quota", "none")
Isolation = Literal["root", "user namespace", "none"]

#: What is off by more is not the cluster that the file describes.
TOLERANCE = 0.05

#: Name of the user's job, beside the loads that measure.
JOB = "job"


class UntrueError(HexiError):
    """The testbed is off from the file's cluster by more than the tolerance: do not use its figures."""

    exit_code = 4


@dataclass(frozen=True)
class Quota:
    """A GPU's part of the machine."""

    cgroup: str
    core: int
    share: float


@dataclass(frozen=True)
class Lab:
    """A run of the testbed.

    Args:
        gpus: the GPUs of the cluster file that the job's ranks stand for, in rank order.
    """

    folder: Path
    speeds: Speeds
    links: bool
    isolation: Isolation
    gpus: tuple[int, ...]
    quotas: tuple[Quota, ...]
    program: tuple[str, ...]
    throttles: tuple[Throttle, ...] = ()

    @property
    def cluster(self) -> Path:
        """The cluster file, as it was when the run began."""
        return self.folder / "cluster.yaml"

    @property
    def result(self) -> Path:
        """Path of the document with all measurements."""
        return self.folder / "testbed.json"

    def log(self, job: str, rank: int) -> Path:
        """Return the path of a rank's output."""
        return self.folder / f"{job}-rank-{rank}.log"

    def record(self, job: str, rank: int) -> Path:
        """Return the path of the record that a rank writes when it ends."""
        return self.folder / f"{job}-rank-{rank}.json"


def write_lab(lab: Lab) -> None:
    """Write the request to the lab into the lab's folder."""
    write_text_atomically(lab.folder / "lab.json", json.dumps(asdict(lab), default=str))


def read_lab(folder: str | os.PathLike[str]) -> Lab:
    """Read the lab that `write_lab` has written."""
    return TypeAdapter(Lab).validate_json((Path(folder) / "lab.json").read_bytes())
