"""The authors' inputs and choices (inputs.yaml), and cells of benchmarks.layouts as the authors see them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.layouts import CELLS, ETHERNET, Machines, asked
from benchmarks.rivals import hexiscale, zorse
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.compute import device_speeds, own_block_times, token_times
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request
from megatron_hexi.yaml_file import read_yaml


@dataclass(frozen=True, eq=False)
class HexiscaleCase:
    """A cluster and a job of HexiScale's authors.

    Args:
        name: its name.
        scheduler: the authors' rules for it.
        training: the job as they see it.
        cluster: the same machines of the catalogue.
        job: the job as the cost model sees it.
        seconds: of an iteration of the authors' choice, by their formulas.
        chosen: the pipelines that their code chose.
    """

    name: str
    scheduler: hexiscale.Scheduler
    training: hexiscale.Training
    cluster: Cluster
    job: Job
    seconds: float
    chosen: tuple[hexiscale.Pipeline, ...]


@functools.cache
def _inputs() -> Mapping[str, Any]:
    return dict(read_yaml(Path(__file__).parent / "inputs.yaml").data)


def hexiscale_cases() -> Iterator[HexiscaleCase]:
    """Yield HexiScale's clusters."""
    kinds = _inputs()["hexiscale"]["kinds"]
    for case in _inputs()["hexiscale"]["cases"]:
        model = read_model(case["model"])
        gpus = [
            hexiscale.Gpu(machine, *(kinds[kind][name] for name in ("tflops", "memory", "inside")))
            for machine, (kind, count) in enumerate(case["machines"])
            for _ in range(count)
        ]
        training = hexiscale.Training(
            model.layers, model.hidden_size, case["batch"], case["micro"], case["pipelines"]
        )
        nodes = tuple((kinds[kind]["ours"], 1, count) for kind, count in case["machines"])
        cluster = Machines(nodes, ETHERNET | {"bandwidth_gb_s": case["between"]}).cluster("hexiscale")
        job = Job(
            model=model, seq_length=training.sequence, global_batch_size=case["batch"], precision="bf16"
        )
        yield HexiscaleCase(
            case["name"],
            hexiscale.Scheduler(gpus, case["between"], training),
            training,
            cluster,
            job,
            case["chosen"]["seconds"],
            _numbered(gpus, case["chosen"]["pipelines"]),
        )


def _numbered(gpus: list[hexiscale.Gpu], pipelines: list[list[list[int]]]) -> tuple[hexiscale.Pipeline, ...]:
    """Return pipelines with the number of each GPU: the next ones of a stage's machine."""
    left: dict[int, list[int]] = {}
    for number, gpu in enumerate(gpus):
        left.setdefault(gpu.machine, []).append(number)
    return tuple(
        tuple(
            (tuple(left[machine].pop(0) for _ in range(width)), layers) for machine, width, layers in stages
        )
        for stages in pipelines
    )


def zorse_example() -> tuple[zorse.Machines, zorse.Training, zorse.LayerTimes, zorse.Choice]:
    """Return Zorse's example: the machine, the job, times of a layer, and the authors' choice."""
    case = _inputs()["zorse"]
    machines = zorse.Machines(
        case["gpus"],
        [0] * len(case["gpus"]),
        np.array([[case["bandwidth"]]]),
        np.array([[case["latency"]]]),
        case["memory"],
    )
    training = zorse.Training(**case["training"])
    times = {
        size: {
            kind: zorse.LayerTime(
                _profiled(case["forward"][kind], size), _profiled(case["backward"][kind], size)
            )
            for kind in case["memory"]
        }
        for size in zorse.sizes(training.batch)
    }
    told = case["chosen"]
    groups = (tuple(range(len(case["gpus"]))),)
    chosen = zorse.Choice(
        told["size"], groups, (tuple(told["micro_batches"]),), (tuple(told["layers"]),), told["milliseconds"]
    )
    return machines, training, times, chosen


def _profiled(profile: list[list[float]], size: int) -> float:
    """Return the milliseconds of a layer: as profiled, or on the line through the profile."""
    measured, (slope, intercept) = profile
    return measured[size - 1] if size <= len(measured) else slope * size + intercept


def zorse_cells() -> Iterator[tuple[str, Request, Cluster]]:
    """Yield the cells of benchmarks.layouts on Zorse's clusters."""
    return (asked(*cell) for cell in CELLS if cell[0].startswith("zorse"))


def zorse_view(request: Request, cluster: Cluster) -> tuple[zorse.Machines, zorse.Training, zorse.LayerTimes]:
    """Return a cluster and a job as Zorse sees them, with the cost model's times of a layer.

    Args:
        request: the job.
        cluster: the cluster.
    """
    job, nodes = request.job, cluster.nodes
    devices = {rank.device.name: rank.device for rank in cluster.ranks}
    bandwidth = np.array(
        [
            [
                one.bandwidth if one is other else cluster.bandwidth(one.ranks[0], other.ranks[0])
                for other in nodes
            ]
            for one in nodes
        ]
    )
    usable = _inputs()["zorse"]["usable"]
    machines = zorse.Machines(
        [rank.device.name for rank in cluster.ranks],
        [rank.node for rank in cluster.ranks],
        bandwidth / 1e9,
        1e3 * 1e7 / bandwidth,
        {name: usable.get(name, device.memory_gb) for name, device in devices.items()},
    )
    model = job.model
    training = zorse.Training(
        job.global_batch_size, job.seq_length, model.hidden_size, model.layers, model.layer_params(1)
    )
    times: zorse.LayerTimes = {}
    for size in zorse.sizes(training.batch):
        sized = replace(job, micro_batch_size=size)
        times[size] = {}
        for name, device in devices.items():
            speeds = device_speeds(device, sized)
            rows, tokens = np.array([float(size * job.seq_length)]), np.array([float(job.seq_length)])
            token, heads = (
                token_times(speeds, sized, rows),
                own_block_times(speeds, sized, tokens, causal=True),
            )
            times[size][name] = zorse.LayerTime(
                *(1e3 * float(token[way][0] + size * model.heads * heads[way][0]) for way in range(2))
            )
    return machines, training, times
