"""Rows over the borders of stages with layers of their own, by the table that the runtime sends by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh import Mesh, border_messages
from megatron_hexi.plan import Plan


def border_seconds(
    plan: Plan, job: Job, sections: Sequence[Section], links: LinkTable
) -> tuple[list[Floats], list[Floats]]:
    """How long a micro-batch is under way over each border of each replica, [replicas][borders].

    With ministages the border from the last stage to the first comes last.

    All messages of the borders with one number are one set, as if all replicas sent together.

    Returns:
        Activations there, and gradients back.
    """
    mesh = Mesh(plan, job.micro_batch_size, job.sequence_parallel)
    gpu = np.zeros(len(mesh.places), dtype=np.int64)
    for section in sections:
        gpu[section.ranks] = section.ground.gpus
    row = job.model.hidden_size * job.element_bytes
    depths = [len(replica.stages) for replica in plan.replicas]
    borders = [depth - 1 + mesh.goes_round(r) for r, depth in enumerate(depths)]
    there, back = ([np.zeros(count) for count in borders] for _ in range(2))
    for border in range(max(borders)):
        crossing = [r for r, count in enumerate(borders) if border < count]
        for found, way in ((there, 0), (back, 1)):
            messages = [
                (r, one)
                for r in crossing
                for one in border_messages(
                    mesh, r, (border + way) % depths[r], (border + 1 - way) % depths[r]
                )
            ]
            replica = np.array([r for r, _ in messages])
            src, dst = (gpu[[getattr(one, end) for _, one in messages]] for end in ("source", "target"))
            size = np.array([float(one.rows * row) for _, one in messages])
            seconds = links.message_seconds(src, dst, size)
            for r in crossing:
                found[r][border] = seconds[replica == r].max(initial=0.0)
    return there, back
