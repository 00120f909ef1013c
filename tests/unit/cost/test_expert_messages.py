"""Messages of experts: to each expert by itself, or once to each node, by counts and seconds by hand."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.expert_messages import ExpertRanks, expert_messages
from megatron_hexi.kinds import Experts
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.mesh.experts import ExpertDomain
from megatron_hexi.plan import Replica
from megatron_hexi.plan.units import HeldExperts
from tests.support.costs import cluster, tiny_job
from tests.unit.cost.test_experts import EXPERTS, SPARSE, one_stage

#: Bytes of a row, and of the probabilities of a node's experts.
ROW, PROBABILITY = 512 * 2, 4


def with_nodes(plan, nodes):
    """The plan of one stage whose rows travel once to each of some nodes."""
    (stage,) = plan.replicas[0].stages
    return dataclasses.replace(plan, replicas=(Replica((dataclasses.replace(stage, expert_nodes=nodes),)),))


def none_of(held, active):
    return math.comb(EXPERTS - held, active) / math.comb(EXPERTS, active)


def test_rows_travel_once_between_nodes_and_then_inside_them():
    """Two nodes of two GPUs with 3 + 1 and 2 + 2 experts, 50 GB/s for each GPU between them, 100 inside."""
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], 50)
    tokens = (1000, 2000, 600, 496)
    plan = one_stage(SPARSE, tokens, ((0, 3), (3, 4), (4, 6), (6, 8)))
    once = with_nodes(plan, ((0, 1), (2, 3)))
    job = tiny_job(model=SPARSE)
    found = CostModel(job, known).timing(once).stages[0].layer.forward.expert_exchange
    between = (1 - none_of(4, 2)) * 2000 * (ROW + 4 * PROBABILITY) / 50e9
    # The first rank of a node sends on its own rows and those of its counterpart: 1000 + 600, and 2000 + 496.
    inside = 2 * ROW / EXPERTS * max(1600 * 1, 2496 * 3, 1600 * 2, 2496 * 2) / 100e9
    assert found == pytest.approx(np.full(4, 2 * (between + inside)))


@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 4))
def test_messages_between_nodes_carry_the_rows_of_the_closed_form(seed, count, active):
    """A random domain: rows leave each rank once for each node, and reach every expert inside it."""
    draw = random.Random(seed)
    model = dataclasses.replace(SPARSE, experts=Experts(EXPERTS, active, 256))
    job = tiny_job(model=model)
    cuts = [0, *sorted(draw.randint(0, EXPERTS) for _ in range(count - 1)), EXPERTS]
    node = np.array(sorted(draw.randrange(3) for _ in range(count)))
    held = tuple(HeldExperts(rank, (cuts[rank], cuts[rank + 1])) for rank in range(count))
    by_node = tuple(tuple(np.flatnonzero(node == n).tolist()) for n in np.unique(node))
    domain = ExpertDomain(held, 0, by_node)
    rows = np.array([float(draw.choice((0, 5, 90))) for _ in range(count)])
    counts = np.diff(cuts)
    ranks = ExpertRanks(np.arange(count), np.zeros(count, int), node, rows, counts, counts.astype(float))
    *between, inside = expert_messages(job, ranks)
    expected = {}
    at_gateway = rows.copy()
    for here in by_node:
        experts = sum(int(counts[rank]) for rank in here)
        for src in set(range(count)) - {*here}:
            if rows[src] and experts:
                gateway = domain.gateway(src, here)
                size = (1 - none_of(experts, active)) * (ROW + PROBABILITY * experts)
                expected[src, gateway] = rows[src] * size
                at_gateway[gateway] += rows[src]
    sent = {
        (int(src), int(dst)): size
        for each in between
        for src, dst, size in zip(each.src, each.dst, each.size, strict=True)
    }
    assert sent == pytest.approx(expected)
    for src, dst, size in zip(inside.src, inside.dst, inside.size, strict=True):
        assert node[src] == node[dst]
        assert size == pytest.approx(ROW * active / EXPERTS * at_gateway[src] * counts[dst])


def test_the_simulator_sends_the_same_messages():
    """Its ranks wait for their own messages only, so it is a little faster."""
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], 1.0)
    plan = one_stage(SPARSE, (1024,) * 4, ((0, 2), (2, 4), (4, 6), (6, 8)))
    job = tiny_job(model=SPARSE)
    found = [
        (estimate(each, job, known).iteration_s, simulate(each, job, known).iteration_s)
        for each in (plan, with_nodes(plan, ((0, 1), (2, 3))))
    ]
    for predicted, simulated in found:
        assert 0.88 * predicted <= simulated <= 1.01 * predicted
    assert found[1][0] < found[0][0]
