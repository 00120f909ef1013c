"""The request of the command to the lab, as a file in the run folder, and the paths of all files there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_hexi.errors import HexiError
from megatron_hexi.lab.testbed.throttle import Throttle
from megatron_hexi.text_file import write_text_atomically

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
    """A GPU's part of the machine.

    Args:
        share: share of that core, 0 to 1.
    """

    cgroup: str
    core: int
    share: float


@dataclass(frozen=True)
class Lab:
    """A run of the testbed.

    Args:
        folder: the run folder, absolute; its `cluster` is the file that is emulated.
        links: whether each node and rank has a network namespace with the file's links.
        isolation: way in which the lab gets namespaces of its own.
        gpus: the GPUs of the file that the job's ranks are, in rank order.
        quotas: quota of each GPU of the file, with ``speeds = quota``.
        program: the program for torchrun, with its arguments; empty: only measure.
        throttles: GPUs that are slower for a while in the job, with ``speeds = paced``.
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
    """Write it into its folder."""
    write_text_atomically(lab.folder / "lab.json", json.dumps(asdict(lab) | {"folder": str(lab.folder)}))


def read_lab(folder: str | os.PathLike[str]) -> Lab:
    """Read the lab that `write_lab` has written."""
    data = json.loads((Path(folder) / "lab.json").read_text())
    quotas = tuple(Quota(**quota) for quota in data["quotas"])
    lists = {"gpus": tuple(data["gpus"]), "quotas": quotas, "program": tuple(data["program"])}
    lists |= {"throttles": tuple(Throttle(**throttle) for throttle in data["throttles"])}
    return Lab(**data | lists | {"folder": Path(data["folder"])})
