"""Seconds that rows take from stage to stage: over borders of stages that differ, and between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import pipeline_seconds
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh import Mesh, border_messages

#: Domains of the sending and of the receiving stage that process a micro-batch (`Mesh.taking_domain`).
_Domains = tuple[int | None, int | None]
#: A replica, the sending stage, the receiving stage, and their domains.
_Crossing = tuple[int, int, int, _Domains]


def border_seconds(
    mesh: Mesh, job: Job, sections: Sequence[Section], links: LinkTable, micro_batches: Ints
) -> tuple[list[Floats], list[Floats]]:
    """Return the seconds that each micro-batch is under way over each border between stages of a replica.

    With ministages the border from the last stage to the first comes last.

    Messages of the same micro-batch over borders with the same number share links, as if all replicas sent
    at the same time. A replica with fewer micro-batches than others is counted with its first ones again, and
    the slowest of these times counts.

    Args:
        mesh: the units of all ranks.
        job: the job.
        sections: the sections of the plan.
        links: the cluster's links.
        micro_batches: micro-batches of each replica, [replicas].

    Returns:
        Seconds of activations and seconds of gradients, each [replicas][borders, micro-batches].
    """
    gpu = np.zeros(len(mesh.units), dtype=np.int64)
    for section in sections:
        gpu[section.ranks] = section.placement.gpus
    row = job.model.hidden_size * job.element_bytes
    depths = [len(replica.stages) for replica in mesh.plan.replicas]
    borders = [depth - 1 + mesh.wraps_around(r) for r, depth in enumerate(depths)]
    there, back = ([np.zeros(shape) for shape in zip(borders, micro_batches, strict=True)] for _ in range(2))

    @cache
    def seconds(crossings: tuple[_Crossing, ...]) -> list[float]:
        """Return the seconds until the last message of each crossing has arrived."""
        messages = [
            (number, one)
            for number, (r, source, target, domains) in enumerate(crossings)
            for one in border_messages(mesh, r, source, target, domains=domains)
        ]
        owner = np.array([number for number, _ in messages])
        src, dst = (gpu[[getattr(one, end) for _, one in messages]] for end in ("source", "target"))
        size = np.array([float(one.rows * row) for _, one in messages])
        found = links.message_seconds(src, dst, size)
        return [float(found[owner == number].max(initial=0.0)) for number in range(len(crossings))]

    for border in range(max(borders)):
        crossing = [r for r, count in enumerate(borders) if border < count]
        for found, way in ((there, 0), (back, 1)):
            ends = {r: ((border + way) % depths[r], (border + 1 - way) % depths[r]) for r in crossing}
            # Unless domains take whole micro-batches, all micro-batches are alike.
            for turn in range(max(micro_batches[crossing]) if mesh.plan.takes_micro_batches else 1):
                turns = {r: turn % micro_batches[r] for r in crossing}
                crossings = tuple((r, *ends[r], _domains(mesh, r, ends[r], turns[r])) for r in crossing)
                for r, time in zip(crossing, seconds(crossings), strict=True):
                    own = turns[r] if mesh.plan.takes_micro_batches else slice(None)
                    found[r][border, own] = np.maximum(found[r][border, own], time)
    return there, back


def interleaved_borders(
    job: Job, sections: Sequence[Section], links: LinkTable, micro_batches: Ints
) -> tuple[list[Floats], list[Floats]]:
    """Return the seconds that a chunk's gradients are under way over each border of a repeated stage.

    Activations are counted in the time of the stage that sends them (`stage_cost`), so their seconds are 0.

    Args:
        job: the job.
        sections: the pipeline stages.
        links: the cluster's links.
        micro_batches: micro-batches of each replica, [replicas].

    Returns:
        Seconds of activations and seconds of gradients, each [replicas][stages, micro-batches]; the border
        from the last stage to the first comes last.
    """
    gpus = [section.placement.stage.gpus for section in sections]
    rows = job.micro_batch_size * sections[0].arrays.tokens.astype(float)
    back = np.array(
        [
            pipeline_seconds(links, job, rows, behind, own)
            for own, behind in zip(gpus, [*gpus[1:], gpus[0]], strict=True)
        ]
    )
    both = [np.broadcast_to(back[:, None], (len(gpus), count)) for count in micro_batches.tolist()]
    return [np.zeros(one.shape) for one in both], both


def _domains(mesh: Mesh, replica: int, ends: tuple[int, int], micro_batch: int) -> _Domains:
    source, target = ends
    return mesh.taking_domain(replica, source, micro_batch), mesh.taking_domain(replica, target, micro_batch)
