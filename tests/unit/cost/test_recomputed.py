"""Bytes and seconds of modules that are computed again, by closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hexi.cost import estimate
from megatron_hexi.cost.compute import device_speeds, rates
from megatron_hexi.cost.layer_bytes import Freed, freed_bytes, routed_row_bytes
from megatron_hexi.cost.memory import weight_bytes
from megatron_hexi.cost.moved_bytes import step_bytes
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import proportional_plan
from megatron_hexi.planner import Request
from megatron_hexi.planner.recomputation import offered
from tests.support.costs import TINY, cluster, tiny_job

EXPERTS = Job(presets()["qwen3-30b-a3b"], 4096)
LATENT = Job(presets()["deepseek-v3"], 4096)


def test_an_mlp_keeps_its_input_alone():
    job = tiny_job(recompute=("mlp",))
    fused, apart = (freed_bytes(replace(job, unfused=unfused)) for unfused in ((), ("norms",)))
    assert fused == Freed(0, 2 * (512 + 2 * 2048), 0)  # the norm's output too: the input is the norm's
    assert apart == Freed(0, 2 * 2 * 2048, 0)
    assert freed_bytes(replace(job, recompute=("layernorm",), unfused=("norms",))) == Freed(1024, 1024, 0)
    assert freed_bytes(replace(job, recompute=("layernorm",))) == Freed(0, 0, 0)


def test_experts_keep_their_rows_or_all_but_activations():
    freed = {
        name: freed_bytes(replace(EXPERTS, recompute=(name,))) for name in ("moe", "moe_act", "layernorm")
    }
    assert freed["moe"].routed == routed_row_bytes(EXPERTS)
    assert freed["moe_act"] == Freed(0, 0, 2 * 768)
    assert freed["layernorm"] == Freed(0, 2 * 2048, 0)
    assert freed["moe"].feed_forward == 0


def test_seconds_of_an_mlp_are_those_of_its_products_and_bytes():
    known, plan = cluster([("a", "PLAIN", 1)]), proportional_plan(tiny_job().workload(), [[[1.0]]])
    plain, again = (estimate(plan, tiny_job(recompute=mode), known).phases for mode in ("none", ("mlp",)))
    speeds = device_speeds(known.nodes[0].device, tiny_job())
    (rate,) = rates(speeds.matmul, np.array([4096.0]))
    products = 2 * 2 * 4096 * 512 * 2048 / rate
    # Both results are written; a norm and an activation read and write each column.
    moved = 2 * 4096 * (2048 + 512 + 2 * 512 + 2 * 2048) / speeds.memory
    assert again.token - plain.token == pytest.approx(TINY.layers * (products + moved))
    assert again.attention == plain.attention


def test_types_of_the_optimizer_s_state_are_its_bytes():
    assert weight_bytes(tiny_job()).state == 12
    assert weight_bytes(tiny_job(state_bytes=8)).state == 8
    assert weight_bytes(tiny_job(gradient_bytes=2)) == (2, 2, 12)
    each, shard = step_bytes(tiny_job(gradient_bytes=2))
    assert (each, shard) == (step_bytes(tiny_job())[0] / 2, step_bytes(tiny_job())[1])


@pytest.mark.parametrize(
    ("job", "sets"),
    [
        (tiny_job(), [("mlp",)]),
        (tiny_job(model=replace(TINY, biases=True)), []),
        (EXPERTS, [("layernorm",), ("layernorm", "moe")]),
        (replace(EXPERTS, unfused=()), [("layernorm", "moe_act"), ("layernorm", "moe")]),
        (replace(EXPERTS, unfused=(), precision="fp8", fp8_recipe="delayed"), [("moe",)]),
        (LATENT, [("layernorm", "mla_up_proj"), ("layernorm", "mla_up_proj", "mlp", "moe")]),
        (replace(LATENT, latent_exchange=True), [("layernorm",), ("layernorm", "mlp", "moe")]),
    ],
)
def test_sets_that_stages_are_offered_are_those_that_the_model_has(job, sets):
    assert offered(Request(job), job) == ("none", *sets, "full")


def test_a_set_that_is_fixed_is_alone():
    job = tiny_job(recompute=3)
    assert offered(Request(job, fixed=frozenset({"recompute"})), job) == (3,)


def test_where_a_plan_sends_latent_columns_they_are_not_made_wide_again():
    sent = replace(LATENT, latent_exchange=True)
    assert offered(Request(LATENT), sent) == offered(Request(sent), sent)
