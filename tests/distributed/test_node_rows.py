"""Rows travel once to each node that holds some of their experts, and come back summed: as if on one rank."""

import math
import random
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.megatron.stages import node_rows
from megatron_hexi.megatron.stages.node_rows import NodeRows
from megatron_hexi.mesh import ExpertDomain
from megatron_hexi.plan.units import HeldExperts
from tests.support.threads import run_ranks

HIDDEN = 6


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    """Megatron makes the tensors of an all-to-all on the current device."""
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        yield


def drawn_domain(seed, ranks, experts):
    """Ranks with unequal numbers of whole experts on nodes of unequal sizes, and the rows of each."""
    draw = random.Random(seed)
    cuts = sorted(draw.randint(0, experts) for _ in range(ranks - 1))
    ends = [0, *cuts, experts]
    held = tuple(HeldExperts(rank, (ends[rank], ends[rank + 1])) for rank in range(ranks))
    nodes = draw.randint(2, ranks)
    order = draw.sample(range(ranks), ranks)
    of_rank = {rank: place if place < nodes else draw.randrange(nodes) for place, rank in enumerate(order)}
    by_node = [tuple(rank for rank in range(ranks) if of_rank[rank] == node) for node in range(nodes)]
    return ExpertDomain(held, 0, tuple(by_node)), [draw.choice((1, 2, 7, 20)) for _ in range(ranks)]


def drawn_rows(seed, rank, count, experts, active):
    """Rows, their experts and the probabilities of these, in fp64."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    rows = torch.randn(count, HIDDEN, generator=source, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(count, experts, generator=source, dtype=torch.float64)
    chosen = torch.zeros(count, experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(active, dim=1).indices, True)
    probs = (scores * chosen).requires_grad_()
    return rows, chosen, probs


def computed(rows, chosen, probs):
    """The sum over a row's experts of probability times a function that differs between experts."""
    experts = torch.arange(1, chosen.shape[1] + 1, dtype=torch.float64)
    each = torch.tanh(rows[:, None, :] * experts[None, :, None] / 3)
    return (each * (probs * chosen)[:, :, None]).sum(dim=1)


def check(seed, ranks, experts, active):
    """Compare results and gradients of all ranks with those computed where the rows are."""
    domain, counts = drawn_domain(seed, ranks, experts)
    home = {rank: node for node in domain.nodes for rank in node}

    def run(me):
        rows, chosen, probs = drawn_rows(seed, me.rank, counts[me.rank], experts, active)
        exchange = NodeRows(domain, me.rank, me.new_group("domain", range(ranks)), rows.device)
        there, map_there, probs_there = exchange.there(rows, chosen, probs)
        other = sorted({*range(experts)} - {*domain.inside(home[me.rank]).experts})
        assert not map_there[:, other].any()
        assert map_there.any(dim=1).all(), "a row comes only for experts of this node"
        back = exchange.back(computed(there, map_there, probs_there))
        weights = torch.cos(torch.arange(back.numel(), dtype=torch.float64)).view_as(back)
        back.backward(weights)
        expected_rows, _, expected_probs = drawn_rows(seed, me.rank, counts[me.rank], experts, active)
        expected = computed(expected_rows, chosen, expected_probs)
        expected.backward(weights)
        pairs = ((back, expected), (rows.grad, expected_rows.grad), (probs.grad, expected_probs.grad))
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    run_ranks(ranks, run)


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 12), st.integers(1, 4))
def test_rows_and_gradients_are_those_of_one_rank(seed, ranks, experts, active):
    check(seed, ranks, experts, min(active, experts))


@pytest.mark.parametrize(
    ("target", "name", "wrong"),
    [
        pytest.param(node_rows, "widened", lambda rows: rows.roll(1, 0), id="another row's result"),
        pytest.param(torch.Tensor, "index_add", torch.Tensor.index_copy, id="one node's result"),
        pytest.param(
            ExpertDomain,
            "experts",
            property(lambda self: [e for one in self.held for e in range(*one.experts)][1:]),
            id="an expert less",
        ),
    ],
)
def test_planted_faults_are_found(target, name, wrong):
    with mock.patch.object(target, name, wrong), pytest.raises(AssertionError):
        check(5, 6, 12, 4)


def test_bytes_between_nodes_are_those_of_the_closed_form():
    """Top 8 of 32 experts on 4 nodes: of 6 copies of a row that leave a node, about 2.7 are left."""
    ranks, experts, active, count = 8, 32, 8, 400
    held = tuple(HeldExperts(rank, (4 * rank, 4 * rank + 4)) for rank in range(ranks))
    domain = ExpertDomain(held, 0, ((0, 1), (2, 3), (4, 5), (6, 7)))
    sent = [0] * ranks

    def run(me):
        rows, chosen, probs = drawn_rows(3, me.rank, count, experts, active)
        exchange = NodeRows(domain, me.rank, me.new_group("domain", range(ranks)), rows.device)
        exchange.there(rows, chosen, probs)
        assert exchange._route is not None
        sent[me.rank] = sum(exchange._route.sent) - exchange._route.sent[me.rank]

    run_ranks(ranks, run)
    without = math.comb(experts - 8, active) / math.comb(experts, active)
    assert sum(sent) / (ranks * count) == pytest.approx(3 * (1 - without), rel=0.02)
    assert active * 3 / 4 / (3 * (1 - without)) == pytest.approx(2.17, abs=0.02)
