"""Modules that are computed again by themselves: losses and each gradient are those without recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron import te_emulated
from tests.megatron import test_unit_weights as weights
from tests.megatron.forked import Forks
from tests.megatron.option_cases import SELECTIVE
from tests.megatron.test_te_training import EmulatedTe

DENSE = weights.MODELS["attention"]
DENSE = replace(DENSE, words=(*DENSE.words, "--disable-bias-linear"))
LATENT = weights.MODELS["latent"]
LATENT = replace(LATENT, words=(*LATENT.words, "--disable-bias-linear"), layers=2)
EXPERTS = weights.MODELS["experts"]
#: Grouped products, which alone have a module for their activation.
GROUPED = replace(EXPERTS, words=(*EXPERTS.words, "--moe-grouped-gemm"))
CASES = {
    "core_attn": (DENSE, True),
    "layernorm": (DENSE, True),
    "mlp": (DENSE, True),
    "core_attn layernorm mlp": (DENSE, False),
    "mla_up_proj": (LATENT, True),
    "mla_up_proj core_attn layernorm mlp": (LATENT, True),
    "moe": (EXPERTS, True),
    "shared_experts": (EXPERTS, True),
    "core_attn layernorm moe shared_experts": (EXPERTS, True),
}
#: Those that run by default.
QUICK = {"mla_up_proj core_attn layernorm mlp", "core_attn layernorm moe shared_experts"}
WITH_TE = ("moe_act", "layernorm", "moe_act layernorm shared_experts core_attn", "moe moe_act")


@pytest.mark.parametrize(
    "modules", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_each_gradient_is_that_without(modules: str, forks: Forks, tmp_path: Path):
    model, is_sequence = CASES[modules]
    compared = weights.comparison(forks, tmp_path)
    weights.check(compared(model, is_sequence, more=(*SELECTIVE, *modules.split()))[0])


@pytest.fixture(scope="module")
def te() -> Iterator[EmulatedTe]:
    with EmulatedTe("tests.megatron.te_forked") as started:
        yield started


@pytest.mark.slow
@pytest.mark.skipif(not te_emulated.is_available(), reason="Transformer Engine's wheel is not unpacked")
@pytest.mark.parametrize("modules", WITH_TE)
def test_each_gradient_of_transformer_engine_is_that_without(modules: str, te: EmulatedTe, tmp_path: Path):
    compared = weights.comparison(te, tmp_path, alone_under_plan=True)
    weights.check(compared(GROUPED, True, more=(*SELECTIVE, *modules.split()))[0])
