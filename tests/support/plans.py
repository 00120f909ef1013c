"""Random valid plans: every shape that the checks let through, not only those that a planner would write."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_hexi.plan import (
    Domain,
    Exchange,
    Group,
    Mask,
    Member,
    Plan,
    Replica,
    Stage,
    UnitRates,
    Workload,
    unit_ranks,
    validate_plan,
)
from megatron_hexi.plan.layout import merge_segments

#: Any length; the shortest, where most are left empty, more often.
LENGTHS = (1, 2, 3, 5, 7, 11, 13, *range(1, 200))


#: How much of each property's examples is tried; `tests/conftest.py` says when it is all.
SHARE = float(os.environ.get("HEXI_EXAMPLES", "1"))


def examples(count):
    """Settings for a property: always the same examples, however long one takes."""
    return settings(
        max_examples=max(min(count, 6), round(count * SHARE)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


#: Sizes are dealt out by these: hypothesis itself prefers small and equal ones, where few faults hide. Up to
#: 24 bits it draws evenly.
RANDOMS = st.integers(0, 2**24 - 1).map(Random)


@st.composite
def workloads(draw, lengths=LENGTHS, most_heads=12, head_dims=(1, 3, 8), value_dims=(None,)):
    """A workload; up to `most_heads` heads on each tensor-parallel rank, with any KV heads that fit."""
    random = draw(RANDOMS)
    parallel = random.choice([1, 1, 1, 2, 4])
    heads = random.randint(1, most_heads) * parallel
    kv_heads = [
        count
        for count in range(1, heads + 1)
        if heads % count == 0 and (count % parallel == 0 or parallel % count == 0)
    ]
    return Workload(
        seq_length=random.choice(lengths),
        heads=heads,
        kv_heads=random.choice([*kv_heads, *kv_heads[1:-1] * 2]),
        head_dim=random.choice(head_dims),
        causal=random.random() < 0.7,
        tensor_parallel=parallel,
        value_dim=random.choice(value_dims),
    )


@st.composite
def cuts(draw, total, parts):
    """`parts` consecutive ranges that cover [0, total); some may be empty."""
    return _cuts(draw(RANDOMS), total, parts)


@st.composite
def scattered_segments(draw, seq_length, groups):
    """For each group any positions, as segments; all groups together have every position once."""
    return _scattered_segments(draw(RANDOMS), seq_length, groups)


@st.composite
def plans(draw, workload=None, most_ranks=8, most_replicas=1):
    """A valid plan: ranks, tokens, heads and positions dealt out anyhow."""
    workload = draw(workloads() if workload is None else workload)
    random = draw(RANDOMS)
    replicas = []
    first_rank = 0
    for _ in range(random.randint(1, most_replicas)):
        count = random.randint(1, most_ranks)
        numbers = random.sample(range(first_rank, first_rank + count), count)
        domain = deal_domain(random, workload, [unit_ranks(workload, number) for number in numbers])
        first_rank += count
        replicas.append(Replica((Stage((domain,)),)))
    plan = Plan(workload, tuple(replicas), Exchange(random.randint(1, 3), random.randint(1, 4)))
    validate_plan(plan)
    return plan


@st.composite
def masks(draw, workload):
    """A mask for a workload: any window, any documents, or neither."""
    random = draw(RANDOMS)
    if not workload.causal:
        return Mask(causal=False)
    window = random.choice([None, 0, 1, random.randint(1, 12), random.randint(1, 200)])
    lengths = [stop - start for start, stop in _cuts(random, workload.seq_length, random.randint(1, 9))]
    return Mask(window=window, documents=random.choice([None, tuple(lengths)]))


@st.composite
def with_rates(draw, plan):
    """The plan as it is, or with rates of its units by which documents are dealt."""
    random, units = draw(RANDOMS), plan.units
    if random.random() < 0.5:
        return plan
    rates = UnitRates(
        tuple(random.uniform(1, 4) for _ in range(units)),
        tuple(random.uniform(0.01, 1) for _ in range(units)),
        tuple(random.randint(0, 2 * plan.workload.seq_length) for _ in range(units)),
        attended=random.choice([0.0, 0.3]),
    )
    return replace(plan, rates=rates)


def _cuts(random, total, parts):
    # An end among the cuts, or one cut twice, is an empty range.
    ends = [random.choice([0, total, *[random.randint(0, total)] * 6]) for _ in range(parts - 1)]
    return list(itertools.pairwise([0, *sorted(ends), total]))


def _scattered_segments(random, seq_length, groups):
    pieces = [(random.randrange(groups), piece) for piece in _cuts(random, seq_length, 4 * groups)]
    return [merge_segments(piece for owner, piece in pieces if owner == group) for group in range(groups)]


def deal_domain(random, workload, units, samples=None, states=(1,)):
    """A domain of some units: groups, tokens, heads and positions dealt out anyhow.

    Args:
        random: of `random.Random`.
        workload: with the units' tensor-parallel size.
        units: the ranks of each; groups take them in this order.
        samples: how many it takes of each micro-batch.
        states: shares of state that a unit may have.
    """
    count = len(units)
    breaks = sorted(random.sample(range(1, count), random.randint(0, count - 1)))
    owned = [sorted(units[start:stop]) for start, stop in itertools.pairwise([0, *breaks, count])]
    segments = _scattered_segments(random, workload.seq_length, len(owned))
    groups = []
    for number, members in enumerate(owned):
        tokens = _cuts(random, sum(stop - start for start, stop in segments[number]), len(members))
        # Head ranges need not follow the order of the ranks.
        heads = random.sample(_cuts(random, workload.local_heads, len(members)), len(members))
        groups.append(
            Group(
                segments[number],
                tuple(
                    Member(ranks, stop - start, head_range, random.choice(states))
                    for ranks, (start, stop), head_range in zip(members, tokens, heads, strict=True)
                ),
                name=f"group-{number}",
            )
        )
    return Domain(tuple(groups), samples)


def one_replica(workload, *groups, window=1, parts=1):
    """A plan of one domain."""
    plan = Plan(workload, (Replica((Stage((Domain(groups),)),)),), Exchange(window, parts))
    validate_plan(plan)
    return plan


#: A KV head cut in the middle, on both sides differently; a rank without heads; one without tokens.
TORN = one_replica(
    Workload(29, 6, 2, 4),
    Group(((0, 5), (20, 29)), (Member((0,), 9, (0, 2)), Member((1,), 0, (2, 5)), Member((2,), 5, (5, 6)))),
    Group(((5, 20),), (Member((3,), 8, (0, 0)), Member((4,), 7, (0, 6)))),
    parts=2,
)

#: Ranks with 1, 2, 3, 4 and 6 KV heads, cut in the middle on both sides; three queries read each.
RAGGED = one_replica(
    Workload(41, 18, 6, 4),
    Group(((0, 7), (30, 41)), (Member((0,), 5, (0, 2)), Member((1,), 9, (2, 8)), Member((4,), 4, (8, 18)))),
    Group(((7, 18),), (Member((2,), 3, (0, 5)), Member((5,), 8, (5, 12)), Member((6,), 0, (12, 18)))),
    Group(((18, 30),), (Member((3,), 12, (0, 18)),)),
    window=2,
    parts=4,
)

#: Four groups, of which one has no tokens and one stands in the middle of another.
SPARSE = one_replica(
    Workload(17, 3, 1, 4),
    Group(((0, 1), (16, 17)), (Member((1,), 2, (0, 3)),)),
    Group((), (Member((0,), 0, (0, 1)), Member((5,), 0, (1, 3)))),
    Group(((1, 4), (6, 9), (12, 16)), (Member((2,), 10, (2, 3)), Member((3,), 0, (0, 2)))),
    Group(((4, 6), (9, 12)), (Member((4,), 5, (0, 3)),)),
    window=2,
)
