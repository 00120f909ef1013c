"""A recipe trains: scaled down, on CPUs, under an uneven plan, with its optimizer and schedule."""

from __future__ import annotations

import math
import re

import pytest

from megatron_hexi.models import recipes
from megatron_hexi.plan import Workload, proportional_plan

#: What makes it small; the rest is the recipe's. CPUs train in fp32, and without a tokenizer's files.
SMALL = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--kv-channels": 16,
    "--vocab-size": 127,
    "--max-position-embeddings": 96,
    "--seq-length": 96,
    "--global-batch-size": 4,
    "--train-iters": 10,
    "--tokenizer-type": "NullTokenizer",
    "--mock-data": None,
    "--num-workers": 0,
    "--eval-iters": 0,
}
#: Without biases: Megatron's own layers add an expert's bias in place, which autograd refuses on one rank.
EXPERTS = {
    "--num-experts": 4,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-topk": 2,
    "--disable-bias-linear": None,
}
LATENT = {
    "--kv-channels": 24,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--moe-layer-freq": "[0,1]",
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-num-groups": 2,
    "--moe-router-group-topk": 1,
}
LEFT_OUT = ("--bf16", "--tokenizer-model", "--split", "--moe-grouped-gemm")
SLOW = ("llama3-8b-128k", "llama3-70b-512k", "qwen3-30b-a3b-128k", "gpt-oss-20b-32k", "deepseek-v3-32k")


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-8b-128k",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_a_recipe_trains(name, forks, tmp_path):
    recipe = recipes()[name]
    flags = {flag: value for flag, value in recipe.flags.items() if flag not in LEFT_OUT} | SMALL
    if "--num-experts" in flags:
        flags |= EXPERTS
    workload = Workload(96, 4, 2, 16)
    if "--multi-latent-attention" in flags:
        del flags["--num-query-groups"]
        flags |= LATENT
        workload = Workload(96, 4, 4, 24, value_dim=16)
    args = [str(word) for pair in flags.items() for word in pair if word is not None]
    plan = proportional_plan(workload, [[[3, 2], [1]]])
    log = forks.train(tmp_path, ranks=3, args=args, plan=plan)
    assert len(log.losses) == 10
    # Near the entropy of a guess, as untrained models are, at rates that are too low for more.
    assert all(loss == pytest.approx(math.log(128), abs=0.5) for loss in log.losses)
    rates = [float(rate) for rate in re.findall(r"learning rate: (\S+)", log.output)]
    assert max(rates) == rates[0] == pytest.approx(recipe.lr)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < recipe.lr / 2
