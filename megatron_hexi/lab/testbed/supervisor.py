"""``python -m megatron_hexi.lab.testbed.supervisor FOLDER``: process 1 of the lab.

It builds the links, measures, runs the job, measures again, and writes what it found. When it ends, all ends.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import megatron_hexi
from megatron_hexi.cluster import Cluster, cluster_digest, read_cluster
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.lab.testbed import truth
from megatron_hexi.lab.testbed.isolation import go_first
from megatron_hexi.lab.testbed.job import Ended, run_job
from megatron_hexi.lab.testbed.lab import JOB, Lab, UntrueError, read_lab
from megatron_hexi.lab.testbed.network import LinkMeasured, build_network, measure_links, raise_loopback
from megatron_hexi.lab.testbed.quotas import correct_shares
from megatron_hexi.text_file import write_text_atomically

_ATTEMPTS = 3
_LOAD = ("-m", "megatron_hexi.lab.testbed.in_rank.load")
#: Seconds of it. A quota varies by a tenth from one moment to the next; over so long, by a few per cent.
_LOAD_S = {"paced": 4, "quota": 12}

#: What a figure from here is made of, by how speeds are set.
_METHODS = {
    "paced": "paced: durations of matrix products and attention are modelled; overlap, network, order of "
    "events and numbers are real; all other work is free as far as it fits into the head-room",
    "quota": "quotas of processor time: nothing is modelled, ratios of speeds only are the file's",
    "none": "no speeds: every rank runs as fast as the machine lets it",
}


class TestbedMeasurements(NamedTuple):
    """The measurements before or after the job."""

    links: list[LinkMeasured]
    speeds: list[truth.SpeedMeasured]
    attempts: int = 1


def main(folder: str) -> int:
    """Run the lab, and return the job's exit code.

    Raises:
        UntrueError: the testbed is not the cluster that the file describes.
    """
    lab = read_lab(folder)
    cluster = read_cluster(lab.cluster)
    go_first(lab)
    if lab.links:
        build_network(cluster)
    elif lab.isolation != "none":
        raise_loopback()
    if lab.speeds == "quota":
        _say("measuring speeds, to correct the quotas")
        speeds = {speed.gpu: 1 + speed.error for speed in _measure_speeds(lab, cluster, "load-first")}
        lab = replace(lab, quotas=correct_shares(lab.quotas, speeds))
    measured = {"before": _measure(lab, cluster, "before", load=lab.speeds != "none")}
    problems = _problems(lab, cluster, measured["before"])
    ended = None
    if lab.program and not problems:
        _say("running the job")
        ended = run_job(lab, cluster, JOB, lab.program, show=True)
        if not ended.code:
            # The job has told how it kept its pace; of quotas only another load can tell.
            measured["after"] = _measure(lab, cluster, "after", load=lab.speeds == "quota")
            problems += _problems(lab, cluster, measured["after"])
    paces = truth.read_pace(lab, ended.records) if ended and lab.speeds == "paced" else []
    problems += truth.pace_problems(cluster, paces)
    document = _document(lab, cluster, measured, paces, ended, problems)
    write_text_atomically(lab.result, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if ended and ended.code:
        _say(f"hexi: error: {ended.failure}")
        return ended.code
    if problems:
        raise UntrueError("; ".join(problems))
    return 0


def _measure(lab: Lab, cluster: Cluster, when: str, *, load: bool) -> TestbedMeasurements:
    """Measure links and speeds; repeat those that are off, since other work on the machine comes and goes."""
    measured = TestbedMeasurements([], [])
    for attempt in range(1, _ATTEMPTS + 1):
        again = f", attempt {attempt} of {_ATTEMPTS}" if attempt > 1 else ""
        if lab.links and (attempt == 1 or truth.link_problems(cluster, measured.links)):
            _say(f"measuring links {when}{again}")
            measured = measured._replace(links=measure_links(cluster))
        if load and (attempt == 1 or truth.speed_problems(cluster, measured.speeds, lab.speeds)):
            _say(f"measuring speeds {when}{again}")
            measured = measured._replace(speeds=_measure_speeds(lab, cluster, f"load-{when}-{attempt}"))
        if not _problems(lab, cluster, measured):
            break
    return measured._replace(attempts=attempt)


def _measure_speeds(lab: Lab, cluster: Cluster, name: str) -> list[truth.SpeedMeasured]:
    ended = run_job(lab, cluster, name, (*_LOAD, str(_LOAD_S[lab.speeds])), show=False)
    if ended.code:
        raise HexiError(f"the load that measures speeds failed: {ended.failure}")
    return truth.read_speeds(lab, cluster, name)


def _problems(lab: Lab, cluster: Cluster, measured: TestbedMeasurements) -> list[str]:
    return [
        *truth.link_problems(cluster, measured.links),
        *truth.speed_problems(cluster, measured.speeds, lab.speeds),
    ]


def _document(
    lab: Lab,
    cluster: Cluster,
    measured: dict[str, TestbedMeasurements],
    paces: Sequence[truth.PaceMeasured],
    ended: Ended | None,
    problems: Sequence[str],
) -> dict[str, Any]:
    return {
        "cluster": {"name": cluster.file.name, "digest": cluster_digest(cluster)},
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "megatron_hexi": megatron_hexi.__version__,
            "torch": version("torch"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "program": list(lab.program),
        "exit_code": ended.code if ended else None,
        "speeds": lab.speeds,
        "method": _METHODS[lab.speeds],
        "links_emulated": lab.links,
        "latency_emulated": False,
        "isolation": lab.isolation,
        "quotas": [asdict(quota) for quota in lab.quotas],
        "problems": list(problems),
        "gpus": [
            {
                "gpu": rank.rank,
                "name": cluster.rank_name(rank.rank),
                "device": rank.device.name,
                "memory_gib": rank.device.usable_gib,
            }
            for rank in cluster.ranks
        ],
        "ranks_on_gpus": list(lab.gpus),
        "measured": {
            when: {"links": _rows(found.links), "speeds": _rows(found.speeds), "attempts": found.attempts}
            for when, found in measured.items()
        },
        "pace": _rows(paces),
    }


def _rows(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(item) | {"error": item.error} for item in items]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1]))
