"""Products in fp8, counted by hand: rates, casts, copies, rows and memory by recipe and GPU."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hexi.cluster import device
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import device_speeds, optimizer_seconds
from megatron_hexi.cost.fp8 import computed_rows, copies
from megatron_hexi.cost.layer_bytes import Flights, freed_bytes, routed_row_bytes, token_activation_bytes
from megatron_hexi.cost.memory import Holdings, part_memory, part_params, static_memory
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.moved_bytes import layer_elements
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import Domain, Exchange, Group, Member, Plan, Replica, Stage
from tests.support.costs import cluster, tiny_job

H100, B200, A100 = (device(name) for name in ("H100-SXM-80GB", "B200-180GB", "A100-SXM-80GB"))


def fp8_job(recipe, **how):
    return tiny_job(precision="fp8", fp8_recipe=recipe, **how)


def holdings(copies):
    one = np.ones(len(copies))
    tokens, flights = 1000 * one, Flights(0 * one, 0 * one)
    held = Holdings(tokens, tokens, 4 * one, 4 * one, one.astype(int), flights)
    return replace(held, fp8_copies=np.array(copies))


@pytest.mark.parametrize(
    ("recipe", "rates", "kept"),
    [
        ("tensorwise", (1402.6, 3432.5), (2, 1)),
        ("delayed", (1402.6, 3432.5), (2, 1)),
        ("blockwise", (1386, 2886), (2, 2)),  # scales of 128 x 128 weights
        ("mxfp8", (None, 2886), (0, 2 * (1 + 1 / 32))),
    ],
)
def test_a_gpu_multiplies_in_fp8_where_its_rate_by_the_recipe_is_known(recipe, rates, kept):
    job = fp8_job(recipe)
    for gpu, rate, bytes_kept in zip((H100, B200), rates, kept, strict=True):
        speeds, usual = device_speeds(gpu, job), device_speeds(gpu, tiny_job())
        assert (speeds.output, speeds.causal, speeds.full) == (usual.matmul, usual.causal, usual.full)
        assert speeds.fp8_copies == copies(gpu, recipe) == bytes_kept
        if rate is None:
            assert speeds == usual
        else:
            assert speeds.matmul.rate(2**20) == pytest.approx(0.875 * rate, rel=0.07)
    assert device_speeds(A100, job) == device_speeds(A100, tiny_job())
    assert not device_speeds(device("L40S-48GB"), job).in_fp8


def test_casts_by_hand():
    # Of a TINY layer: inputs of projection 512 and second MLP matrix 2048 forward; gradients of query, key
    # and value 1536, of the MLP 2048 and of two residuals 1024 backward; norms' outputs 1024.
    plain = layer_elements(tiny_job())
    assert layer_elements(fp8_job("delayed")) == plain
    pace = 0.9 / 0.64 / 2
    for recipe, kept, cast, behind_norm in (
        ("delayed", 2, 4, 0),  # read 2, written 1 and 1
        ("tensorwise", 2, 6, 4),  # read twice, once behind a norm
        ("tensorwise", 1, 5, 3),
        ("blockwise", 2, 4.0625, 4.0625),
        ("mxfp8", 2.0625, 4.0625, 0),
    ):
        found = layer_elements(fp8_job(recipe), kept)
        assert found == pytest.approx(
            (
                plain[0] + pace * (cast * (512 + 2048) + behind_norm * 1024),
                plain[1] + pace * cast * (1536 + 2048 + 1024),
            )
        ), recipe


@pytest.mark.parametrize(("recipe", "each"), [("delayed", 4), ("tensorwise", 6), ("blockwise", 4.0625)])
def test_each_iteration_makes_the_weights_copies(recipe, each):
    usual, job = device_speeds(H100, tiny_job()), fp8_job(recipe)
    more = optimizer_seconds(device_speeds(H100, job), job, 2000, 0.0, 1000)
    more -= optimizer_seconds(usual, tiny_job(), 2000, 0.0)
    assert more == pytest.approx(1000 * each / usual.memory)


@pytest.mark.parametrize(
    ("recipe", "step"), [("delayed", 16), ("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)]
)
def test_rows_are_padded_to_the_recipes_step(recipe, step):
    tokens, in_fp8 = np.array([1.0, step, step + 1, step + 1, 0]), np.array([True, True, True, False, True])
    assert computed_rows(fp8_job(recipe), tokens, in_fp8).tolist() == [step, step, 2 * step, step + 1, 0]
    cut = fp8_job(recipe, tensor_parallel=2, micro_batch_size=2, global_batch_size=2)
    of_rank = 128 if recipe == "blockwise" else step
    assert computed_rows(cut, tokens[:1], True).tolist() == [2 * 2 * of_rank]
    assert computed_rows(tiny_job(), tokens, False).tolist() == tokens.tolist()


def test_rows_are_gathered_in_fp8_and_summed_in_16_bits():
    rows, no_latency = np.array([100.0, 100.0]), np.zeros(2)
    job = fp8_job("delayed", tensor_parallel=2)
    found = tensor_parallel_seconds(job, rows, np.ones(2), no_latency, np.array([True, False]))
    assert found.tolist() == [100 * 512 * (1 + 2) / 2, 100 * 512 * 2]
    whole = fp8_job("delayed", tensor_parallel=2, sequence_parallel=False)
    assert tensor_parallel_seconds(whole, rows, np.ones(2), no_latency, True).tolist() == [100 * 512 * 2] * 2


def test_kept_activations_by_hand():
    # Two norms' inputs and the MLP's first output in 16 bits; norms' outputs and the MLP's second input in 8;
    # the projection's input in 8 by delayed scales, else attention's output in 16.
    assert token_activation_bytes(fp8_job("delayed")) == 2 * (2 * 512 + 2048) + 2 * 512 + 2048 + 512
    assert token_activation_bytes(fp8_job("tensorwise")) == 2 * (2 * 512 + 2048 + 512) + 2 * 512 + 2048
    blocks = 2 * (2 * 512 + 2048 + 512) + (1 + 4 / 128) * (2 * 512 + 2048)
    assert token_activation_bytes(fp8_job("blockwise")) == blocks
    qwen = Job(presets()["qwen3-30b-a3b"], 4096, precision="fp8")
    # h 2048 in, 2 x 768 out, 768 in.
    kind = next(kind for kind in qwen.kinds if kind.model.routed)
    assert routed_row_bytes(kind) == 2048 + 2 * 2 * 768 + 768
    assert routed_row_bytes(kind.in_bf16) == 2 * (2048 + 3 * 768)


def test_each_reader_of_a_norm_keeps_its_own_copy_in_fp8():
    # Latent attention has two matrices behind its norm; a router keeps 16 bits, a shared expert a cast copy.
    def bytes_of(name, recompute="none"):
        job = Job(presets()[name], 4096, precision="fp8", fp8_recipe="tensorwise", recompute=recompute)
        return next(kind for kind in job.kinds if kind.model.routed)

    def normed(kind):
        columns = kind.model.feed_forward.row_columns(kind.model, 1, 1, False)
        mixer = kind.model.mixer.row_columns(kind.model, 1, 1, False)
        inside = 2 * (mixer.normed + mixer.kept + mixer.inputs + columns.kept) + columns.inputs
        return token_activation_bytes(kind) - inside - mixer.compressed - 2 * 2 * kind.model.hidden_size

    deepseek, qwen = bytes_of("deepseek-v3"), bytes_of("qwen3-30b-a3b")
    assert normed(deepseek) == (2 + 2 + 1) * 7168
    assert normed(qwen) == (1 + 2) * 2048
    again = bytes_of("deepseek-v3", ("layernorm", "shared_experts"))
    shared = freed_bytes(bytes_of("deepseek-v3", ("shared_experts",)))
    assert freed_bytes(again).mixer == 2 * 7168
    assert shared.feed_forward == 7168 + 2 * 2 * 2048 + 2048
    assert freed_bytes(again).feed_forward == shared.feed_forward + 2 * 7168


def test_weights_have_copies_in_fp8_on_the_gpus_that_use_them():
    job, part = fp8_job("tensorwise"), ModelPart.of_job(fp8_job("tensorwise"), 0)
    matrices = job.model.layers * job.model.matrix_params()
    params = part_params(job, part)
    for kept in (2, 1, 0):
        terms = static_memory(job, part, params, params, params, kept)
        assert terms["weights"] == 2 * params + kept * matrices
    # Experts' matrices have copies, too.
    qwen = Job(presets()["qwen3-30b-a3b"], 4096, precision="fp8")
    whole = ModelPart.of_job(qwen, 0)
    few, many = (float(static_memory(qwen, whole, 0, 0, 0, 2, count)["weights"]) for count in (0, 16))
    assert many - few == 2 * 48 * 16 * 3 * 2048 * 768


def test_a_unit_without_fp8_keeps_what_bf16_keeps():
    job = fp8_job("tensorwise")
    part = ModelPart.of_job(job, 0)
    both = part_memory(job, part, holdings([2.0, 0.0]), 1, 0.0)
    alone = part_memory(job, part, holdings([2.0]), 1, 0.0)
    plain = part_memory(tiny_job(), part, holdings([0.0]), 1, 0.0)
    for term, values in both.items():
        pair = [float(np.ravel(terms[term])[0]) for terms in (alone, plain)]
        assert (np.zeros(2) + values).tolist() == pytest.approx(pair), term
    assert np.ravel(alone["activations"])[0] < np.ravel(plain["activations"])[0]


def halves(job):
    """A plan of one domain of two members, each with half of everything."""
    heads, experts = job.model.heads // 2, (job.model.expert_count or 0) // 2
    members = tuple(
        Member(
            (rank,),
            job.seq_length // 2,
            (rank * heads, (rank + 1) * heads),
            experts=((rank * experts, (rank + 1) * experts),) if experts else None,
        )
        for rank in (0, 1)
    )
    stage = Stage((Domain((Group(((0, job.seq_length),), members),)),), layers=(0, job.model.layers))
    workload = replace(job.workload(), experts=job.model.expert_count)
    return Plan(workload, (Replica((stage,), 2),), Exchange())


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_layers_at_both_ends_in_bf16_take_the_time_and_memory_of_bf16(name):
    machines = cluster([("h", "H100-SXM-80GB", 2)], bandwidth=100)

    def cost(ends, precision="fp8"):
        model = replace(presets()[name], layers=4, ends_in_bf16=ends)
        job = Job(model, 4096, global_batch_size=2, precision=precision, fp8_recipe="tensorwise")
        timing = CostModel(job, machines).timing(halves(job))
        return timing.phases.total, float(timing.needed[0][0])

    low, plain = cost((0, 0)), cost((0, 0), "bf16")
    # The time of an iteration is linear in the layers of each kind.
    of_layer = (plain[0] - low[0]) / 4
    for ends, layers in (((1, 0), 1), ((0, 1), 1), ((1, 2), 3), ((4, 0), 4), ((3, 3), 4)):
        seconds, needed = cost(ends)
        assert seconds == pytest.approx(low[0] + layers * of_layer, rel=1e-6), ends
        assert (needed == plain[1]) == (layers == 4)
    assert cost((1, 0), "bf16") == pytest.approx(plain)
