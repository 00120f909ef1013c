"""Random valid plans whose stages differ, and the boxes of weights that their ranks would hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from megatron_hexi.mesh import Box, Mesh
from megatron_hexi.plan import JobTerms, Plan, Replica, Stage, Workload, validate_plan
from tests.support.plans import RANDOMS, deal_domain

#: Any length; short ones, of which most ranks get nothing, more often.
_LENGTHS = (1, 2, 3, 5, 7, 11, 13, *range(1, 60))


@st.composite
def meshes(draw, most_ranks=8, most_replicas=3):
    """The mesh of a random plan with stages, with and without sequence parallelism."""
    random = draw(RANDOMS)
    heads = random.choice([1, 2, 4, 8, 8, 12])
    workload = Workload(
        random.choice(_LENGTHS),
        heads,
        random.choice([count for count in (1, 2, 4, 8, 12) if heads % count == 0]),
        head_dim=4,
        layers=random.randint(1, 6),
    )
    micro_batch_size = random.randint(1, 5)
    plan = stage_plan(random, workload, micro_batch_size, random.randint(2, most_ranks), most_replicas)
    return Mesh(plan, micro_batch_size, sequence_parallel=random.random() < 0.5)


def stage_plan(random, workload, micro_batch_size, ranks, most_replicas=3, micro_batches=None):
    """A random valid plan for so many ranks; the first of them reads data, the last has a loss, as jobs need.

    Args:
        random: of `random.Random`.
        workload: with layers.
        micro_batch_size: samples of a micro-batch.
        ranks: at least 2.
        most_replicas: of 1 to 4 stages each.
        micro_batches: what the replicas take together; ``None``: anything.
    """
    depths = [1] * random.randint(1, min(most_replicas, (ranks + 1) // 2))
    for _ in range(random.randint(0, max(1, ranks // 2))):
        replica = random.randrange(len(depths))
        if depths[replica] < min(4, workload.layers) and sum(depths) < ranks:
            depths[replica] += 1
    sizes = [[1] * depth for depth in depths]
    for _ in range(ranks - sum(depths)):
        stages = random.choice(sizes)
        stages[random.randrange(len(stages))] += 1
    between = random.sample(range(1, ranks - 1), ranks - 2)
    unused = iter([0, *between, ranks - 1])  # the first for a first stage, the last for a last one
    shares = [random.randint(1, 3) for _ in sizes]
    if micro_batches is not None:
        ends = sorted(random.sample(range(1, micro_batches), len(sizes) - 1))
        shares = [stop - start for start, stop in itertools.pairwise([0, *ends, micro_batches])]
    replicas = []
    for stages, share in zip(sizes, shares, strict=True):
        cuts = sorted(random.sample(range(1, workload.layers), len(stages) - 1))
        layers = itertools.pairwise([0, *cuts, workload.layers])
        replicas.append(
            Replica(
                tuple(
                    Stage(
                        _domains(random, workload, micro_batch_size, [next(unused) for _ in range(size)]),
                        layers=own,
                    )
                    for size, own in zip(stages, layers, strict=True)
                ),
                share,
            )
        )
    random.shuffle(replicas)
    return job_plan(workload, replicas, micro_batch_size)


def job_plan(workload, replicas, micro_batch_size):
    """A valid plan of replicas with stages of their own; the tensor-parallel size follows from them."""
    plan = Plan(workload, tuple(replicas), job=JobTerms(micro_batch_size=micro_batch_size))
    widths = {len(member.ranks) for member in plan.members}
    width = widths.pop() if len(widths) == 1 else 0
    plan = replace(plan, workload=replace(workload, tensor_parallel=width))
    validate_plan(plan)
    return plan


def _domains(random, workload, micro_batch_size, ranks):
    """Domains of a stage: one, or several that share the samples."""
    most = min(len(ranks), micro_batch_size)
    count = random.randint(2, most) if most > 1 and random.random() < 0.5 else 1
    starts = sorted(random.sample(range(1, len(ranks)), count - 1))
    samples = [1] * count
    for _ in range(micro_batch_size - count):
        samples[random.randrange(count)] += 1
    own = itertools.pairwise([0, *starts, len(ranks)])
    return tuple(
        _domain(random, workload, sorted(ranks[start:stop]), None if count == 1 else taken)
        for (start, stop), taken in zip(own, samples, strict=True)
    )


def _domain(random, workload, ranks, samples):
    heads, kv_heads = workload.heads, workload.kv_heads
    widths = [
        width
        for width in (1, 2, 4)
        if len(ranks) % width == 0 and heads % width == 0 and (kv_heads % width == 0 or width % kv_heads == 0)
    ]
    (width,) = random.choices(widths, weights=widths)
    count = len(ranks) // width
    # Neighbours, or ranks that lie apart.
    units = [ranks[i::count] for i in range(count)]
    if random.random() < 0.5:
        units = [ranks[i * width : (i + 1) * width] for i in range(count)]
    units = [tuple(unit) for unit in random.sample(units, count)]
    own = replace(workload, tensor_parallel=width)
    return deal_domain(random, own, units, samples, states=(1, 1, 2, 3, 7))


#: Rows of a projection and of the embedding: divisible by every tensor-parallel size.
_ROWS, _HIDDEN = 8, 3


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of one rank of a tiny model.

    Args:
        boxes: of its weights, one below the other.
        is_copy: whether every rank of the unit holds the same.
    """

    boxes: tuple[Box, ...]
    is_copy: bool = False


def parameters_of(mesh, rank):
    """What a rank holds: norms, both kinds of projection, fused gates, and tied embeddings at both ends."""
    unit = mesh.units[rank]
    width = unit.width
    total = mesh.plan.workload.layers
    step = _ROWS // width
    own = (unit.ranks.index(rank) * step, (unit.ranks.index(rank) + 1) * step)
    found = []
    for layer in range(*unit.layers):
        one = (layer, layer + 1)

        def box(key, shape, *cell, one=one):
            return Box(key, (one, *cell), (total, *shape), one[1])

        found += [
            ModelParameter((box("layers.norm", (_HIDDEN,), (0, _HIDDEN)),), is_copy=True),
            ModelParameter((box("layers.columns", (_ROWS, _HIDDEN), own, (0, _HIDDEN)),)),
            ModelParameter((box("layers.rows", (_HIDDEN, _ROWS), (0, _HIDDEN), own),)),
            ModelParameter(
                tuple(
                    box("layers.gated", (2 * _ROWS, _HIDDEN), (half + own[0], half + own[1]), (0, _HIDDEN))
                    for half in (0, _ROWS)
                )
            ),
        ]
    embedding = Box("embedding", (own, (0, _HIDDEN)), (_ROWS, _HIDDEN), 0)
    if unit.stage == 0:
        found.append(ModelParameter((embedding,)))
    if unit.is_last:
        behind = Box("last norm", ((0, _HIDDEN),), (_HIDDEN,), total + 1)
        found.append(ModelParameter((behind,), is_copy=True))
        if unit.stage > 0:
            found.append(ModelParameter((replace(embedding, depth=total + 1),)))
    return found


def boxes_of(mesh):
    """The boxes of all ranks."""
    return [
        [box for one in parameters_of(mesh, rank) for box in one.boxes] for rank in range(len(mesh.units))
    ]
