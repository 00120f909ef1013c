"""Routed experts: the ranks that hold them, the rows that ranks compute, and seconds of a layer's experts.

Between attention and the next layer the ranks of an expert domain (`plan.units`) send each token to the
ranks that hold its experts, compute these, and send the results back. All of them wait for each other at both
all-to-alls (`expert_messages`). Assumed: all expert domains of a stage exchange at the same time.

Shape letters: U units, R ranks, M messages, E experts of a layer, k experts of a token, h hidden size,
f width of an expert, n rows that a rank's experts compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.calls import expert_calls
from megatron_hexi.cost.compute import Speeds, layer_factors, rates
from megatron_hexi.cost.expert_messages import ExpertExchanges, ExpertRanks
from megatron_hexi.cost.fp8 import cast_bytes
from megatron_hexi.cost.layer import ExpertCycle
from megatron_hexi.cost.moved_bytes import CAST_PACE, routed_activation, routed_elements
from megatron_hexi.cost.products import Products, Times, product_seconds
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh.experts import ExpertDomain, job_experts
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import Precision

#: Rows of the rank whose experts are busiest, in standard deviations above the mean.
_DEVIATIONS = 2
#: Part of a single product's rate, at the rows of an expert, that torch's grouped products reach on an H100:
#: 0.83 to 0.98, mean 0.89, of nine sizes (docs/results/one-gpu.md). Transformer Engine's reached 628 and 554
#: TFLOP/s with 8 experts of 4,096 rows and 16 of 2,048, 2048 x 768, where this says 573
#: (https://github.com/NVIDIA/TransformerEngine/pull/2045).
GROUPED_SHARE = 0.89


@dataclass(frozen=True, eq=False)
class ExpertsOnRanks:
    """Routed experts of the units of a section, in each layer with experts.

    Args:
        count: number of experts, or slices of experts, that each rank holds, [U, tensor_parallel].
        parts: number of slices into which each of a unit's experts is cut; 1: they are whole, [U].
        domain: number of each unit's expert domain, the same in all sections of a stage, [U].
        domain_rows: number of rows of a micro-batch in that domain, [U].
        node: number of each rank's node in that domain; 0 in one whose rows go to each expert by itself,
            [U, tensor_parallel].
    """

    count: Ints
    parts: Ints
    domain: Ints
    domain_rows: Floats
    node: Ints

    @property
    def whole(self) -> Floats:
        """Number of experts on the fullest rank of each unit, [U]; a slice is a part of one."""
        return self.count.max(axis=1) / self.parts

    def rows(self, job: Job) -> Floats:
        """Return the rows that the e experts or slices of each unit's fullest rank compute, [U].

        k D e / E of the D rows of the domain, times 1 + 2 c / sqrt(e) for the rank with the busiest experts,
        for loads of variation c (`Job.expert_imbalance`).
        """
        return busiest_rows(job, self.count.max(axis=1), self.domain_rows)


def place_experts(plan: Plan, job: Job, sections: Sequence[Section]) -> list[ExpertsOnRanks | None]:
    """Return the experts of each section's units; ``None``: the model has none.

    Args:
        plan: the plan; units for which it gives no experts hold all of a layer's.
    """
    if job.model.experts is None:
        return [None] * len(sections)
    held = job_experts(plan, job.model.experts.count)
    ranks = [(section.ranks % plan.ranks).tolist() for section in sections]
    rows: dict[tuple[int, int], float] = {}
    numbers: list[list[tuple[int, int]]] = []
    for section, own in zip(sections, ranks, strict=True):
        numbers.append([(section.number, held[unit[0]][0].held[0].rank) for unit in own])
        units = section.job.micro_batch_size * section.arrays.tokens
        for number, more in zip(numbers[-1], units.tolist(), strict=True):
            rows[number] = rows.get(number, 0.0) + more
    order = {number: place for place, number in enumerate(rows)}
    return [
        ExpertsOnRanks(
            count=np.array([[held[rank][1].count for rank in unit] for unit in own]),
            parts=np.array([held[unit[0]][1].parts for unit in own]),
            domain=np.array([order[number] for number in of_units]),
            domain_rows=np.array([rows[number] for number in of_units]),
            node=np.array([[_node(held[rank][0], rank) for rank in unit] for unit in own]),
        )
        for own, of_units in zip(ranks, numbers, strict=True)
    ]


def expert_cycles(
    sections: Sequence[Section], experts: Sequence[ExpertsOnRanks | None], exchanges: ExpertExchanges
) -> list[tuple[ExpertCycle | None, ...]]:
    """Return the seconds of the experts in a layer of each kind, for each section.

    ``None`` for kinds without experts.
    """
    placed = [held for held in experts if held is not None]
    kinds = sections[0].job.kinds
    if not placed:
        return [(None,) * len(kinds)] * len(sections)
    # There and back, in both directions.
    seconds = [np.stack([2 * way, 2 * way]) for way in _section_seconds(sections, placed, exchanges)]
    exchange = _by_domain(placed, seconds)
    found: list[Sequence[ExpertCycle | None]] = []
    for kind in kinds:
        compute = [
            np.array(expert_times(own, held, kind.precision))
            for own, held in zip(sections, placed, strict=True)
            if kind.model.routed
        ]
        again = [activation_seconds(own, held) for own, held in zip(sections, placed, strict=True)]
        slowest = _by_domain(placed, compute) if compute else []
        cycles = zip(compute, exchange, slowest, again, strict=True) if compute else ()
        found.append([ExpertCycle(own, moves, longest - own, act) for own, moves, longest, act in cycles])
    nothing = [None] * len(sections)
    return list(zip(*(cycles or nothing for cycles in found), strict=True))


def activation_seconds(section: Section, held: ExpertsOnRanks) -> Floats:
    """Return the seconds of the activation of each unit's experts in one layer, forward, [U]."""
    job, (experts,) = section.job, section.job.model.routed
    size = routed_activation(job).forward * job.element_bytes * experts.ffn_hidden_size
    seconds = held.rows(job) * size / held.parts
    for speeds, units in section.placement.stage.by_kind:
        seconds[units] /= speeds.memory
    return seconds


def expert_times(section: Section, held: ExpertsOnRanks, precision: Precision) -> Times:
    """Return the seconds of each unit's experts in one layer, forward and backward, [U].

    Products of n rows at the rate of n / e, with e experts' weights (products.py); and in both directions
    rows that are permuted, the activation, and in fp8 casts of both products' inputs and of their outputs'
    gradients, which nothing before them makes. Or, where that is longer, the host's calls (calls.py).

    Args:
        precision: the layer's; layers of a job in fp8 may stay in bf16.
    """
    job, stage = replace(section.job, precision=precision), section.placement.stage
    times = np.zeros((2, len(held.parts)))
    for speeds, units in stage.by_kind:
        times[:, units] = routed_times(
            speeds, job, held.count.max(axis=1)[units], held.parts[units], held.rows(job)[units]
        )
    return Times(times[0], times[1])


def routed_times(speeds: Speeds, job: Job, count: Ints, parts: Ints, rows: Floats) -> Times:
    """Return the seconds of the experts on GPUs of one model in one layer, as `expert_times` does, [U].

    Args:
        count: number of experts, or slices, on each GPU, [U].
        parts: number of slices of each expert, [U].
        rows: number of rows that the experts of each GPU compute, [U].
    """
    speeds, model, (experts,) = speeds.of_layers(job), job.model, job.model.routed
    matrices, width = experts.expert_matrices(model) / parts, experts.ffn_hidden_size / parts
    columns = (1 + model.gated) * width
    products = product_seconds(
        GROUPED_SHARE * rates(speeds.matmul, rows / np.maximum(count, 1)),
        speeds.memory,
        rows,
        Products(matrices, count * matrices, model.hidden_size + width, columns + model.hidden_size),
        layer_factors(speeds, job),
    )
    element = rows * job.element_bytes / speeds.memory
    moved, activation = routed_elements(job, in_fp8=speeds.in_fp8), routed_activation(job)
    host = speeds.call_s * (rows > 0)
    forward, backward = (
        seconds + (model.hidden_size * of_row + width * of_column) * element
        for seconds, of_row, of_column in zip(products, moved, activation, strict=True)
    )
    if speeds.in_fp8:
        cast = CAST_PACE * cast_bytes(job.fp8_recipe, speeds.fp8_copies) * rows / speeds.memory
        forward = forward + cast * (model.hidden_size + width)
        backward = backward + cast * (model.hidden_size + columns)
    calls = expert_calls(count, in_fp8=speeds.in_fp8, biased=model.biases)
    return Times(np.maximum(forward, host * calls.forward), np.maximum(backward, host * calls.backward))


def expert_ranks(sections: Sequence[Section], placed: Sequence[ExpertsOnRanks]) -> ExpertRanks:
    """Return the ranks of one stage, section by section, as they exchange rows of experts."""
    return ExpertRanks(
        gpus=np.concatenate([section.placement.gpus.ravel() for section in sections]),
        domain=np.concatenate([np.repeat(held.domain, held.count.shape[1]) for held in placed]),
        node=np.concatenate([held.node.ravel() for held in placed]),
        rows=np.concatenate([_rank_rows(section) for section in sections]),
        count=np.concatenate([held.count.ravel() for held in placed]),
        whole=np.concatenate([(held.count / held.parts[:, None]).ravel() for held in placed]),
    )


def _section_seconds(
    sections: Sequence[Section], placed: Sequence[ExpertsOnRanks], exchanges: ExpertExchanges
) -> list[Floats]:
    """Return the seconds of an all-to-all of a layer in each unit's domain, [U] for each section."""
    found = []
    for stage in sorted({section.number for section in sections}):
        own = [number for number, section in enumerate(sections) if section.number == stage]
        ranks = expert_ranks([sections[number] for number in own], [placed[number] for number in own])
        seconds = exchanges.seconds(sections[own[0]].job, ranks)
        first = 0
        for number in own:
            shape = placed[number].count.shape
            size = shape[0] * shape[1]
            found.append((number, seconds[first : first + size].reshape(shape).max(axis=1)))
            first += size
    return [seconds for _, seconds in sorted(found, key=lambda pair: pair[0])]


def _by_domain(placed: Sequence[ExpertsOnRanks], values: Sequence[Floats]) -> list[Floats]:
    """Return the largest value of each unit's expert domain, [..., U] for each section."""
    most = np.zeros((1 + max(int(held.domain.max()) for held in placed), *values[0].shape[:-1]))
    for held, own in zip(placed, values, strict=True):
        np.maximum.at(most, held.domain, own.T)
    return [most[held.domain].T for held in placed]


def _rank_rows(section: Section) -> Floats:
    """Return the rows of a micro-batch on each rank, [R]; the ranks of a unit divide its rows."""
    width = section.ranks.shape[1]
    rows = section.job.micro_batch_size * section.arrays.tokens.astype(float) / width
    return np.repeat(rows, width)


def busiest_rows(job: Job, count: Ints, domain_rows: Floats) -> Floats:
    """Return the rows that a GPU's experts compute if they are the busiest of their expert domain, [U].

    The mean, and above it a few standard deviations of the loads that the job's `expert_imbalance` states.

    Args:
        count: number of experts, or slices of experts (expert tensor parallelism), on each GPU, [U].
        domain_rows: number of rows of a micro-batch in its expert domain, before they go to the `active`
            experts of each, [U].
    """
    (experts,) = job.model.routed
    mean = experts.active * domain_rows * count / experts.count
    spread = _DEVIATIONS * job.expert_imbalance / np.sqrt(np.maximum(count, 1)) * (count < experts.count)
    return np.minimum(mean * (1 + spread), experts.active * domain_rows)


def _node(domain: ExpertDomain, rank: int) -> int:
    """Return the number of a rank's node in its expert domain; 0 without nodes."""
    return next((number for number, node in enumerate(domain.nodes) if rank in node), 0)
