"""Random valid plans: every shape that the checks let through, not only those that a planner would write."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_hexi.plan import Domain, Exchange, Group, Member, Plan, Replica, Stage, Workload, validate_plan
from megatron_hexi.plan.layout import merge_segments

#: Primes, powers of two and their neighbours, and whatever hypothesis thinks of.
LENGTHS = st.sampled_from([1, 2, 3, 7, 13, 31, 32, 33, 61, 64, 97, 127, 128, 199]) | st.integers(1, 200)


def examples(count):
    """Settings for a property: always the same examples, however long one takes."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@st.composite
def workloads(draw, lengths=LENGTHS, most_heads=12, head_dims=(1, 3, 8), tensor_parallel=True):
    """A workload; `heads` up to `most_heads` on each tensor-parallel rank, with any KV heads that fit."""
    local_heads = draw(st.integers(1, most_heads))
    parallel = draw(st.sampled_from([1, 1, 1, 2, 4])) if tensor_parallel else 1
    heads = local_heads * parallel
    kv_heads = [
        count
        for count in range(1, heads + 1)
        if heads % count == 0 and (count % parallel == 0 or parallel % count == 0)
    ]
    return Workload(
        seq_length=draw(lengths),
        heads=heads,
        kv_heads=draw(st.sampled_from(kv_heads)),
        head_dim=draw(st.sampled_from(head_dims)),
        causal=draw(st.booleans()),
        tensor_parallel=parallel,
    )


@st.composite
def cuts(draw, total, parts):
    """`parts` consecutive ranges that cover [0, total); some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *inner], [*inner, total], strict=True))


@st.composite
def scattered_segments(draw, seq_length, groups):
    """For each group any positions, as segments; all groups together have every position once."""
    pieces = draw(cuts(seq_length, draw(st.integers(1, 3 * groups))))
    owners = draw(st.lists(st.integers(0, groups - 1), min_size=len(pieces), max_size=len(pieces)))
    return [
        merge_segments(piece for piece, owner in zip(pieces, owners, strict=True) if owner == group)
        for group in range(groups)
    ]


@st.composite
def domains(draw, workload, most_ranks=8, first_rank=0):
    """A domain with ranks, tokens, heads and positions dealt out anyhow."""
    ranks = draw(st.permutations(range(first_rank, first_rank + draw(st.integers(1, most_ranks)))))
    breaks = sorted(draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    owned = [sorted(ranks[a:b]) for a, b in zip([0, *breaks], [*breaks, len(ranks)], strict=True)]
    segments = draw(scattered_segments(workload.seq_length, len(owned)))
    groups = []
    for number, members in enumerate(owned):
        tokens = draw(cuts(sum(stop - start for start, stop in segments[number]), len(members)))
        # Head ranges need not follow the order of the ranks.
        heads = draw(st.permutations(draw(cuts(workload.local_heads, len(members)))))
        groups.append(
            Group(
                segments[number],
                tuple(
                    Member(rank, stop - start, head_range)
                    for rank, (start, stop), head_range in zip(members, tokens, heads, strict=True)
                ),
                name=f"group-{number}",
            )
        )
    return Domain(tuple(groups))


@st.composite
def plans(draw, workload=None, most_ranks=8, most_replicas=1):
    """A valid plan."""
    workload = draw(workloads()) if workload is None else draw(workload)
    replicas = []
    first_rank = 0
    for _ in range(draw(st.integers(1, most_replicas))):
        domain = draw(domains(workload, most_ranks, first_rank))
        first_rank += len(domain.members)
        replicas.append(Replica((Stage(domain),)))
    plan = Plan(workload, tuple(replicas), Exchange(draw(st.integers(1, 3))))
    validate_plan(plan)
    return plan
