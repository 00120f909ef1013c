"""Attention in packed documents: against whole sequences, and against batches that are packed and cut."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import estimate
from megatron_hexi.cost.compute import device_speeds, edge_times, own_block_times, rectangle_times
from megatron_hexi.cost.documents import cut_share
from megatron_hexi.cost.layer import UnitGpus, chunk_times, message_bytes
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.throughput import model_flops
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import Latent, Mamba, Window
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Documents, read_documents
from megatron_hexi.plan import proportional_plan
from megatron_hexi.plan.batch_balance import balanced_domain, packed_domain
from megatron_hexi.plan.terms import UnitRates
from tests.support.costs import TINY, cluster, plan_arrays, tiny_job
from tests.support.plans import examples, plans

WINDOWED = dataclasses.replace(TINY, layers=3, window=Window(96, layers=(True, False, True)))
SHAPES = [[[[1.0], [1.0]]], [[[3.0], [2.0, 1.0], [1.0]]], [[[1.0, 1.0], [2.0, 1.0]]]]
LONG = Documents((4096,), (1.0,))


@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["all keys", "windows"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dealt", [False, True])
def test_documents_of_whole_sequences_change_no_bit(model, shape, dealt):
    whole = tiny_job(model=model, global_batch_size=3, recompute="selective")
    packed = dataclasses.replace(whole, documents=dataclasses.replace(LONG, dealt=dealt))
    plan = proportional_plan(whole.workload(), shape)
    half = plan.units // 2
    known = cluster([("a", "DOUBLE", half), ("b", "PLAIN", plan.units - half)])
    assert estimate(plan, packed, known) == estimate(plan, whole, known)
    first, second = (simulate(plan, job, known) for job in (whole, packed))
    assert first == second


@given(plans(most_replicas=1), st.booleans())
@examples(60)
def test_nor_in_random_plans(plan, is_windowed):
    workload = dataclasses.replace(plan.workload, causal=True)
    plan = dataclasses.replace(plan, workload=workload)
    model = dataclasses.replace(
        TINY,
        head_dim=workload.head_dim,
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        window=Window(7) if is_windowed else None,
    )
    job = tiny_job(model=model, seq_length=workload.seq_length)
    packed = dataclasses.replace(job, documents=Documents((workload.seq_length,), (2.0,)))
    arrays, stage = plan_arrays(plan), _stage(plan, job)
    for one, other in zip(_attention(arrays, job, stage), _attention(arrays, packed, stage), strict=True):
        assert np.array_equal(one, other)


def _stage(plan, job):
    """Units on GPUs of one kind."""
    count = len(plan_arrays(plan).tokens)
    speeds = device_speeds(cluster([("a", "PLAIN", 1)]).ranks[0].device, job)
    return UnitGpus(np.arange(count), np.zeros(count, int), {0: speeds}, np.ones(count), np.zeros(count))


def _attention(arrays, job, stage):
    mixing = mixing_of(arrays, job)
    yield mixing.own_times(stage)
    for chunk in mixing.chunks():
        yield chunk_times(arrays, job, stage, chunk)
        yield message_bytes(arrays, job, chunk)


def _positions(group):
    return np.concatenate([np.arange(*one) for one in group.segments] or [np.zeros(0, dtype=int)])


def _counted(domain, documents, window):
    """Pairs of queries of each group and keys of each, and keys of each that some query of each sees."""
    number = np.repeat(np.arange(len(documents)), documents)
    pairs, keys = np.zeros((2, len(domain.groups), len(domain.groups)))
    held = [_positions(group) for group in domain.groups]
    for (i, queries), (j, others) in itertools.product(enumerate(held), repeat=2):
        behind = queries[:, None] - others
        seen = (behind >= 0) & (behind < window) & (number[queries][:, None] == number[others])
        pairs[i, j], keys[i, j] = seen.sum(), seen.any(axis=0).sum()
    return pairs, keys


@pytest.mark.parametrize("window", [1024, 96])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_and_keys_are_those_of_batches_cut_over_all_groups(shape, window):
    documents = read_documents("lognormal:120,0.9,1024")
    model = dataclasses.replace(TINY, window=Window(window) if window < 1024 else None)
    job = tiny_job(model=model, seq_length=1024, documents=documents)
    plan = proportional_plan(job.workload(), shape)
    domain, arrays, stage = plan.replicas[0].domain, plan_arrays(plan), _stage(plan, job)
    drawn = list(itertools.islice(documents.drawn(1024, seed=2), 80))
    counted = [_counted(packed_domain(domain, pieces), pieces, window) for pieces in drawn]
    pairs, keys = (np.mean([both[way] for both in counted], axis=0) for way in range(2))
    # The device has one rate at every size, so that seconds are areas.
    mixing, speeds = mixing_of(arrays, job), device_speeds(cluster([("a", "PLAIN", 1)]).ranks[0].device, job)
    own = mixing.own_times(stage)[0] / arrays.heads
    if window < 1024:
        own = own - _edges(speeds, job, arrays)
    area = own * 1e14 / (4 * 128) + arrays.group_tokens[arrays.group] / 2
    expected = np.diag(pairs)[arrays.group]
    assert area == pytest.approx(expected, rel=0.05)
    for chunk in mixing.chunks():
        for step, parts in enumerate(chunk.steps):
            for group in range(len(arrays.group_tokens)):
                source = (group - step - 1) % len(arrays.group_tokens)
                queries, seen = chunk.queries[parts[0], [group]], chunk.keys[parts[0], [group]]
                seconds = rectangle_times(speeds, job, queries.astype(float), seen.astype(float)).forward
                far = seconds.sum() * 1e14 / (4 * 128)
                assert far == pytest.approx(pairs[group, source], rel=0.08, abs=0.01 * pairs.sum())
                received = chunk.received[parts[0], group]
                # A document of few tokens has none in some group, and its keys need not be sent there.
                assert keys[group, source] <= received * 1.02
                assert received == pytest.approx(keys[group, source], rel=0.12)


def _edges(speeds, job, arrays):
    tokens = arrays.group_tokens[arrays.group].astype(float)
    flat = dataclasses.replace(speeds, memory=np.inf)
    blocks, both = own_block_times(flat, job, tokens, True), own_block_times(speeds, job, tokens, True)
    assert edge_times(flat, job, tokens).forward.max() == 0
    return both.forward - blocks.forward


@pytest.mark.parametrize("shape", [[[[1.0]] * 8], [[[1.0]] * 4 + [[0.5]] * 4], [[[1.0] * 4] * 2]])
@pytest.mark.parametrize("text", ["lognormal:94,1.2,4096", "lognormal:250,0.8,4096"])
def test_dealt_documents_are_cut_about_as_often_as_expected(shape, text):
    documents = dataclasses.replace(read_documents(text), dealt=True)
    job = tiny_job(documents=documents)
    plan = proportional_plan(job.workload(), shape)
    domain = plan.replicas[0].domain
    speeds = [speed for group in shape[0] for speed in group]
    rates = UnitRates(
        tuple(1 / speed for speed in speeds),
        tuple(1.4 / 4096 / speed for speed in speeds),
        tuple(2048 for _ in speeds),
        0.3,
    )
    cut = []
    for pieces in itertools.islice(documents.drawn(4096, seed=3), 30):
        number = np.repeat(np.arange(len(pieces)), pieces)
        groups = balanced_domain(domain, pieces, rates).groups
        held = np.array([np.bincount(number[_positions(group)], minlength=len(pieces)) for group in groups])
        cut.append(sum(np.array(pieces)[(held > 0).sum(axis=0) > 1]) / 4096)
    tokens = np.array([group.tokens for group in domain.groups])
    expected = np.dot(cut_share(job, tokens), tokens) / 4096
    assert expected == pytest.approx(np.mean(cut), abs=0.2)
    assert 0 <= expected < 1


def test_dealt_documents_have_the_same_pairs_in_larger_blocks_and_send_less():
    cut = tiny_job(documents=read_documents("lognormal:250,0.8,4096"))
    dealt = dataclasses.replace(cut, documents=dataclasses.replace(cut.documents, dealt=True))
    plan = proportional_plan(cut.workload(), [[[1.0], [1.0], [2.0]]])
    arrays, stage = plan_arrays(plan), _stage(plan, cut)
    first, second = (list(_attention(arrays, job, stage)) for job in (cut, dealt))
    assert second[0].sum() > first[0].sum()
    assert second[2].sum() < 0.5 * first[2].sum()
    work = [found[0].sum() + found[1].sum() for found in (first, second)]
    assert work[1] < work[0]  # fewer results to add up


def test_model_flops_count_what_documents_see():
    documents = read_documents("lognormal:250,0.8,4096")
    whole, packed = (model_flops(TINY, 4096, documents=held) for held in (None, documents))
    attention = 12 * TINY.layers * TINY.heads * TINY.head_dim
    assert whole - packed == pytest.approx(attention * (2048 - (documents.pairs(4096) / 4096 - 0.5)))


def test_layers_that_predict_further_tokens_attend_within_documents_too():
    """Such layers are of the last layer's kind, so they take as long as further layers of it."""
    known, seconds = cluster([("a", "PLAIN", 1)]), []
    for documents in (None, Documents((256,), (1.0,))):
        for predictions in (0, 1):
            model = dataclasses.replace(TINY, mtp_layers=predictions)
            job = tiny_job(model=model, documents=documents)
            cost = estimate(proportional_plan(job.workload(), [[[1.0]]]), job, known)
            seconds.append(cost.phases.attention)
    assert seconds[1] / seconds[0] == pytest.approx((TINY.layers + 1) / TINY.layers)
    assert seconds[3] / seconds[2] == pytest.approx((TINY.layers + 1) / TINY.layers)
    assert seconds[3] < seconds[1]


@pytest.mark.parametrize(
    ("changes", "dealt", "words"),
    [
        ({"micro_batch_size": 2, "global_batch_size": 2}, False, "--micro-batch-size 2"),
        ({"model": dataclasses.replace(TINY, latent=Latent(512, 64, 128))}, False, "latent attention"),
        (
            {"model": dataclasses.replace(TINY, state=Mamba(4, 128, 4, 16))},
            True,
            "leave --batch-shares out",
        ),
    ],
    ids=["micro-batch", "latent", "state"],
)
def test_what_does_not_train_with_documents_is_refused_by_name(changes, dealt, words):
    documents = dataclasses.replace(LONG, dealt=dealt)
    with pytest.raises(HexiError, match=words):
        tiny_job(documents=documents, **changes)
