"""Seconds that rows take from stage to stage: over borders of stages that differ, and between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import pipeline_seconds
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.recent import Recent
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh import Mesh, border_messages
from megatron_hexi.models.job import Job

#: Borders whose rows are kept: those of four pipelines of 16 stages, both ways.
_MOST_BORDERS = 128

#: Domains of the sending and of the receiving stage that process a micro-batch (`Mesh.taking_domain`).
_Domains = tuple[int | None, int | None]
#: A replica, the sending stage, the receiving stage, and their domains.
_Crossing = tuple[int, int, int, _Domains]


class BorderRows(NamedTuple):
    """The rows of a micro-batch that ranks of a stage send to ranks of another, by message.

    Args:
        source: rank that sends each message, [M].
        target: rank that receives each message, [M].
        rows: number of rows in each message, [M].
    """

    source: Ints
    target: Ints
    rows: Floats


class BorderTables:
    """Rows of borders between stages; plans with the same domains at a border share them."""

    def __init__(self) -> None:
        self._kept = Recent[BorderRows](_MOST_BORDERS)

    def of(self, mesh: Mesh, crossing: _Crossing) -> BorderRows:
        """Return the messages that carry a micro-batch's rows over a border.

        Args:
            crossing: the border, and the domains at both of its ends.
        """
        replica, source, target, domains = crossing
        stages = mesh.plan.replicas[replica].stages
        ends = stages[source].domains, stages[target].domains, domains
        return self._kept.of(
            (*ends, mesh.micro_batch_size, mesh.sequence_parallel), partial(_rows, mesh, crossing)
        )


def _rows(mesh: Mesh, crossing: _Crossing) -> BorderRows:
    replica, source, target, domains = crossing
    messages = border_messages(mesh, replica, source, target, domains=domains)
    return BorderRows(
        np.array([one.source for one in messages], dtype=np.int64),
        np.array([one.target for one in messages], dtype=np.int64),
        np.array([one.num_rows for one in messages], dtype=float),
    )


def border_seconds(
    mesh: Mesh,
    job: Job,
    sections: Sequence[Section],
    links: LinkTable,
    micro_batches: Ints,
    tables: BorderTables,
) -> tuple[list[Floats], list[Floats]]:
    """Return the seconds that each micro-batch is in transit over each border between stages of a replica.

    With ministages the border from the last stage to the first comes last.

    Messages of the same micro-batch over borders with the same number share links, as if all replicas sent
    at the same time. A replica with fewer micro-batches than others is counted with its first ones again, and
    the slowest of these times counts.

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
        sent = [tables.of(mesh, crossing) for crossing in crossings]
        owner = np.repeat(np.arange(len(sent)), [len(one.rows) for one in sent])
        source, target, rows = (np.concatenate(ends) for ends in zip(*sent, strict=True))
        found = links.message_seconds(gpu[source], gpu[target], rows * row)
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
    """Return the seconds that a chunk's gradients are in transit over each border of a repeated stage.

    Activations are counted in the time of the stage that sends them (`stage_cost`), so their seconds are 0.

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
