"""Runs a probe from its first stage to its last; completed stages are kept and not repeated."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

import megatron_hexi
from megatron_hexi.probe.device import local_device, rank_info
from megatron_hexi.probe.document import (
    Measurement,
    Options,
    RankInfo,
    load_partial,
    measurement_from_json,
    save_partial,
)
from megatron_hexi.probe.nodes import find_nodes
from megatron_hexi.probe.stages import Stages
from megatron_hexi.probe.world import World

#: Told what is in progress, how many stages are done, and how many there are.
Progress = Callable[[str, int, int], None]

_RANKS = TypeAdapter(tuple[RankInfo, ...])


def partial_path(out: Path) -> Path:
    """Return the path of the partial measurement, kept until the cluster file is written."""
    return out.parent / f"{out.name}.partial.json"


def probe(world: World, options: Options, partial: Path, *, restart: bool, progress: Progress) -> Measurement:
    """Measure what has not been measured yet. Every rank calls it at once, and all get all of it.

    Raises:
        ElsewhereError: raised on all other ranks then.
        LostRankError: a rank died.
    """
    with world.all_or_none():
        device = local_device()
    hosts = world.gather(socket.gethostname())
    host_ranks = hosts.count(hosts[world.rank])
    with world.all_or_none():
        info = rank_info(options, device, os.environ, host_ranks)
    measured = _begin(world, options, info)
    with world.all_or_none():
        nodes = find_nodes(measured.ranks)
        if world.rank == 0 and not restart:
            measured = load_partial(partial, measured)
    measured = _agreed(world, measured)
    work = Stages(world, options, device, measured.ranks[world.rank], nodes, host_ranks)
    stages = work.all()

    def telling(number: int) -> Callable[[str], None]:
        return lambda what: progress(what, number, len(stages))

    for number, (name, measure) in enumerate(stages):
        if name in measured.done:
            continue
        work.progress = telling(number)
        work.progress(name)
        measured = measure(measured)
        measured = replace(measured, done=(*measured.done, name))
        with world.all_or_none():
            if world.rank == 0:
                save_partial(partial, measured)
    return measured


def _begin(world: World, options: Options, info: RankInfo) -> Measurement:
    """Return an empty measurement by these ranks."""
    ranks = _RANKS.validate_python(world.gather(vars(info)))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Measurement(1, date, megatron_hexi.__version__, options, ranks)


def _agreed(world: World, measured: Measurement) -> Measurement:
    """Broadcast rank 0's measurement to every rank."""
    document = measured.as_dict() if world.rank == 0 else None
    return measurement_from_json(json.dumps(world.gather(document)[0]))
