"""Memory terms by hand, and what is said where it does not suffice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import Shortage, estimate, find_shortage
from megatron_hexi.cost.layer_bytes import (
    Flights,
    attention_bytes,
    logit_bytes,
    logits_bytes,
    token_activation_bytes,
    working_set_bytes,
)
from megatron_hexi.cost.library_bytes import MIB, message_buffer_bytes, workspace_bytes
from megatron_hexi.cost.memory import (
    COLLECTIVES_BYTES,
    FRAGMENTATION,
    GIB,
    RESERVE_BYTES,
    SLACK_BYTES,
    Holdings,
    part_memory,
    part_params,
    static_memory,
    token_bytes,
)
from megatron_hexi.cost.memory_terms import TAGS, Memory, sum_terms
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.moved_bytes import layer_elements
from megatron_hexi.plan import Group, Member, proportional_plan
from tests.support.costs import TINY, cluster, plan_arrays, stage_params, tiny_job
from tests.support.plans import examples, one_replica

LAYER, VOCAB = 3145728 + 1024, 1024 * 512
NONE = Flights(np.zeros(1), np.zeros(1))


def one(value):
    return np.array([value], dtype=float)


def alone(**changes):
    """Memory of a single GPU that does everything."""
    job = tiny_job(**changes)
    plan = one_replica(job.workload(), Group(((0, 4096),), (Member((0,), 4096, (0, 4)),)))
    return Memory.of_unit(whole(job, Holdings.of(plan_arrays(plan), np.array(1), NONE), 1), 0)


def whole(job, held, shards):
    """Bytes of units that have the whole model."""
    part = ModelPart.of_job(job, 0)
    owned = part_params(job, part) / (shards if job.distributed_optimizer else 1)
    return part_memory(job, part, held, 1, owned)


def test_weights_by_hand():
    params = 2 * LAYER + VOCAB + 512
    assert stage_params(tiny_job(), 0) == params
    found = alone()
    assert (found.weights, found.gradients, found.optimizer) == (2 * params, 4 * params, 12 * params)
    half = alone(precision="fp16")
    assert half.weights + half.gradients + half.optimizer == 20 * params
    whole = alone(precision="fp32")
    assert whole.weights + whole.gradients + whole.optimizer == 16 * params


def test_stages_hold_the_embedding_at_either_end():
    job = tiny_job(pipeline_parallel=2)
    assert [stage_params(job, stage) for stage in range(2)] == [LAYER + VOCAB, LAYER + VOCAB + 512]
    untied = tiny_job(model=dataclasses.replace(TINY, tied_embeddings=False))
    assert stage_params(untied, 0) == 2 * LAYER + 2 * VOCAB + 512


def test_the_optimizer_is_shared_by_all_ranks():
    job = tiny_job()
    plan = proportional_plan(job.workload(), [[[1, 1, 1, 1]]])
    flights = Flights(np.zeros(4), np.zeros(4))
    params = stage_params(job, 0)
    for given_job, share in ((job, 4), (tiny_job(distributed_optimizer=False), 1)):
        found = whole(given_job, Holdings.of(plan_arrays(plan), np.array(1), flights), 4)
        assert list(found["optimizer"]) == [12 * params / share] * 4


def test_activations_by_hand():
    # Norms in and out 4 x 512, projection's input 512, MLP 2 x 2048, two bytes each; 13 h as 26 bytes.
    assert token_activation_bytes(tiny_job()) == 2 * (4 * 512 + 512 + 2 * 2048) == 26 * 512
    gated = tiny_job(model=dataclasses.replace(TINY, gated=True))
    assert token_activation_bytes(gated) == 2 * (4 * 512 + 512 + 3 * 2048)
    assert token_activation_bytes(tiny_job(tensor_parallel=2)) == 13 * 512
    fp8 = tiny_job(precision="fp8")
    assert token_activation_bytes(fp8) == 2 * (2 * 512 + 2048) + 2 * 512 + 512 + 2048
    rows = tiny_job(tensor_parallel=2, sequence_parallel=False)
    assert token_activation_bytes(rows) == 13 * 512 + 4 * 512
    assert alone().activations == 2 * 4096 * 26 * 512


def test_attention_by_hand():
    # Query and output of 3 heads, key and value of 2, two bytes; log-sum-exp of 3 heads, four bytes.
    assert attention_bytes(tiny_job(), 10.0, one(100), one(3), one(2)) == [100 * (128 * 10 * 2 + 3 * 4)]
    # Tokens of the whole group, and yet not all heads.
    assert attention_bytes(tiny_job(), 100.0, one(100), one(3), one(2)) == [100 * (128 * 10 * 2 + 3 * 4)]
    # Alone in its group: the output goes into the projection as it is.
    assert alone().attention == 2 * 4096 * (128 * 12 * 2 + 16)


def test_working_set_by_hand():
    # T 10 of G 100 tokens, 3 heads and 2 KV heads of 4 and 4; nothing to exchange.
    inside = 2 * (2 * (10 * 12 + 100 * 7) + 100 * 3 + 100 * 7)
    found = working_set_bytes(tiny_job(), one(10), one(100), one(3), one(2), NONE, 1)
    assert found == [128 * inside]
    # 50 tokens of 2 KV heads arrive, 30 of 2 leave; two steps in flight.
    flights = Flights(one(100), one(60))
    between = 3 * 2 * 700 + 4 * 2 * 200 + 100 * (2 * 2 * 2 + 4 * 2) + 4 * 2 * 60
    assert working_set_bytes(tiny_job(), one(10), one(100), one(3), one(2), flights, 1) == [
        128 * (inside + between)
    ]
    wider = working_set_bytes(tiny_job(), one(10), one(100), one(3), one(2), flights, 2)
    assert wider == [128 * (inside + between + 100 * 2 * 2 + 2 * 2 * 60)]


def test_logits_by_hand():
    # Two bytes and four of softmax; in fp32 the softmax lies where the logits were.
    assert [logit_bytes(tiny_job(precision=kind)) for kind in ("bf16", "fp32")] == [6, 4]
    assert logits_bytes(tiny_job(), one(100), 6) == [100 * (1024 * 6 + 3 * 512 * 2)]
    assert logits_bytes(tiny_job(tensor_parallel=2), one(100), 6) == [100 * (512 * 6 + 3.5 * 512 * 2)]


def test_of_the_loss_and_the_working_set_the_larger_counts():
    model = dataclasses.replace(TINY, vocab_size=64 * 1024)
    few, many = alone(), alone(model=model)
    assert few.logits == 0
    assert many.working_set == few.working_set
    assert many.logits + many.working_set == 4096 * (64 * 1024 * 6 + 3 * 512 * 2)


def test_recomputation_by_hand():
    kept, full, selective = alone(), alone(recompute="full"), alone(recompute="selective")
    assert (full.activations, full.attention) == (2 * 4096 * 512 * 2, 0)
    assert full.working_set == kept.working_set + kept.activations / 2 + kept.attention / 2
    assert (selective.activations, selective.attention) == (kept.activations, 2 * 4096 * 2 * 128 * 12)
    assert selective.working_set == kept.working_set + kept.attention / 2
    one_of_two = alone(recompute=1)
    assert one_of_two.working_set == kept.working_set
    assert one_of_two.activations == (kept.activations + full.activations) / 2


def test_reserve_and_total_by_hand():
    memory = alone()
    moving = memory.activations + memory.attention + memory.working_set + memory.logits
    assert memory.reserve == RESERVE_BYTES + FRAGMENTATION * moving
    assert memory.total == memory.weights + memory.gradients + memory.optimizer + moving + memory.reserve


def test_a_workspace_by_hand():
    # 100 tokens, 3 heads of 128: dQ in fp32 and a row's sum; with two KV heads dK and dV by query head too.
    assert workspace_bytes(tiny_job(), one(100), one(3), one(3)) == [100 * 3 * (128 * 4 + 4)]
    assert workspace_bytes(tiny_job(), one(100), one(3), one(2)) == [100 * 3 * (128 * (4 + 2 * 2) + 4)]
    assert workspace_bytes(tiny_job(precision="fp32"), one(100), one(3), one(2)) == [0]


def test_buffers_for_messages_by_hand():
    arrays = plan_arrays(proportional_plan(tiny_job().workload(), [[[1.0, 1.0], [1.0, 1.0]]]))
    together, apart = np.zeros(4, dtype=int), np.array([0, 0, 1, 1])
    inside = np.full(4, 32)
    # One peer in the group, two in the domain.
    assert list(message_buffer_bytes(arrays, together, inside)) == [12 * MIB * 32 * 3] * 4
    # The other group on another node: no peer of the domain is on this one.
    assert list(message_buffer_bytes(arrays, apart, inside)) == [12 * MIB * 32] * 4
    # Groups over nodes: two channels to the domain's peer here, none to the group's there.
    crossed = np.array([0, 1, 0, 1])
    assert list(message_buffer_bytes(arrays, crossed, inside)) == [12 * MIB * 2] * 4


def test_libraries_are_taken_for_half_a_gib_at_least():
    long = dataclasses.replace(tiny_job(), seq_length=2**20)
    held = Holdings(one(2**20), one(2**20), one(4), one(4), np.array([1]), NONE)
    moving = ("activations", "attention", "working_set", "logits")
    for buffers, expected in ((0.0, 2**20 * 4 * (128 * 4 + 4)), (GIB, GIB + 2**20 * 4 * (128 * 4 + 4))):
        terms = part_memory(long, ModelPart.of_job(long, 0), held, 1, 0.0, message_buffers=buffers)
        rest = FRAGMENTATION * sum(terms[name][0] for name in moving)
        assert terms["reserve"][0] - rest == pytest.approx(SLACK_BYTES + COLLECTIVES_BYTES + expected)


def test_pipelines_keep_micro_batches_in_flight():
    job = tiny_job(pipeline_parallel=2, global_batch_size=8)
    counts = np.array([1, 8])
    assert [list(ModelPart.of_job(job, stage).in_flight(counts)) for stage in (0, 1)] == [[1, 2], [1, 1]]


def test_flights_of_a_plan_by_hand():
    # Two groups of one: the outer one (heads 0-3) sees 1024 keys of the inner one's... all 2048 with its back
    # half; the inner one sees the outer one's front 1024.
    job = tiny_job()
    plan = proportional_plan(job.workload(), [[[1], [1]]])
    nodes = cluster([("a", "PLAIN", 2)])
    ranks = estimate(plan, job, nodes).ranks
    tokens, heads = np.full(2, 2048.0), np.full(2, 4.0)
    bare = working_set_bytes(job, tokens, tokens, heads, heads, NONE, 1)
    flights = Flights(np.array([2048 * 4.0, 1024 * 4]), np.array([1024 * 4.0, 2048 * 4]))
    expected = working_set_bytes(job, tokens, tokens, heads, heads, flights, 1)
    assert [rank.memory.working_set for rank in ranks] == list(expected)
    assert (expected > bare).all()


def test_what_does_not_fit_is_named():
    job = tiny_job(model=dataclasses.replace(TINY, layers=200), seq_length=2**17)
    plan = proportional_plan(job.workload(), [[[3, 1]]])
    cost = estimate(plan, job, cluster([("a", "PLAIN", 2)]))
    assert not cost.fits
    shortage = find_shortage(cost)
    assert isinstance(shortage, Shortage)
    assert shortage is not None
    rank = cost.ranks[0]
    assert (shortage.rank, shortage.name, shortage.term) == (0, "a-0/0", "activations")
    assert shortage.short_gib == pytest.approx(rank.memory.total / GIB - 64)
    assert shortage.term_gib == rank.memory.activations / GIB
    assert "rank 0 (a-0/0, PLAIN) needs" in str(shortage)
    assert "GiB short" in str(shortage)
    small = estimate(
        proportional_plan(tiny_job().workload(), [[[1, 1]]]), tiny_job(), cluster([("a", "PLAIN", 2)])
    )
    assert small.fits
    assert find_shortage(small) is None


@given(st.integers(1, 20), st.sampled_from(["none", "selective", "full"]))
@examples(30)
def test_longer_contexts_never_take_less(length, recompute):
    def total(tokens):
        job = tiny_job(seq_length=tokens, recompute=recompute)
        plan = one_replica(job.workload(), Group(((0, tokens),), (Member((0,), tokens, (0, 4)),)))
        return estimate(plan, job, cluster([("a", "PLAIN", 1)])).memory_gib[0]

    assert total(length * 1000) <= total(length * 1000 + 777)


@examples(40)
@given(
    st.sampled_from(["none", "selective", "full"]),
    st.lists(st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=3), min_size=1, max_size=2),
    st.booleans(),
)
def test_readers_of_tags_count_each_term_once(recompute, groups, is_last):
    assert list(TAGS) == [field.name for field in dataclasses.fields(Memory)]
    job = tiny_job(recompute=recompute)
    plan = proportional_plan(job.workload(), [groups])
    held = Holdings.of(plan_arrays(plan), np.array(1), Flights(np.ones(plan.units), np.ones(plan.units)))
    part = dataclasses.replace(ModelPart.of_job(job, 0), is_last=is_last)
    terms = part_memory(job, part, held, 1, 0.0)
    assert terms.keys() == TAGS.keys()
    # As a balance of tokens and heads reads them (layouts/measured.py), and a stage's table (layer_times.py).
    kept = [sum_terms(terms, "kept", grows) for grows in ("tokens", "heads")]
    assert sum(kept) == pytest.approx(sum_terms(terms, "kept"))
    moving = sum(kept) + sum_terms(terms, "layer") + sum_terms(terms, "loss")
    always = {name for name, tag in TAGS.items() if tag.lasts == "always"}
    assert moving + sum(terms[name] for name in always) == pytest.approx(sum(terms.values()))
    # Tables and bounds sum what static_memory has, and the reserve: what else is always there they miss.
    assert always == {*static_memory(job, part, 0, 0, 0), "reserve"}
    assert {tag.grows for tag in TAGS.values() if tag.lasts == "layer"} == {"heads"}
    assert {tag.grows for tag in TAGS.values() if tag.lasts == "loss"} == {"tokens"}
    assert all(tag.remedy for tag in TAGS.values())


def test_bytes_of_a_token_are_those_of_many_less_those_of_none():
    job = tiny_job(recompute="full")
    alone, held, attended = token_bytes(job, ModelPart.of_job(job, 0), window=1, shards=2)
    params = stage_params(job, 0)
    assert alone == pytest.approx((2 + 4 + 12 / 2) * params + RESERVE_BYTES)
    # Of two layers the inputs; the one at work has all of its activations; then the embedding's gradient.
    assert held > 2 * 512 * 2
    assert attended > 0


def test_norms_of_queries_and_keys_keep_what_they_normalise():
    """4 heads and 2 KV heads of 128: their columns in 16 bits, read and written, and read thrice backward."""
    grouped = dataclasses.replace(TINY, kv_heads=2)
    plain, normed = (tiny_job(model=dataclasses.replace(grouped, qk_norm=has)) for has in (False, True))
    assert token_activation_bytes(normed) - token_activation_bytes(plain) == 2 * 6 * 128
    both = zip(layer_elements(normed), layer_elements(plain), strict=True)
    assert [more - less for more, less in both] == [2 * 6 * 128, 3 * 6 * 128]
