"""Chains of checkpoints: from one layout by another and by one rank back, nothing changes by a bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_hexi.plan import Plan, proportional_plan
from tests.megatron.checkpoint_contents import differences, tensors_of
from tests.megatron.conftest import job, skip_what_is_not_there
from tests.megatron.forked import Forks
from tests.megatron.option_cases import FURTHER_TOKENS, LATENT, SINKS, WINDOW
from tests.megatron.test_ministages import OFFLOADED
from tests.megatron.test_stages_experts import LOSSES
from tests.megatron.test_stages_experts import MODEL as EXPERTS
from tests.megatron.test_stages_states import (
    CONVOLUTION,
    DEPTHS,
    GPT,
    HYBRID,
    INTERLEAVED,
    MINISTAGES,
    MIXED,
    QWEN,
    SPARSE,
)
from tests.megatron.test_stages_training import CASES, LAYERS, MODEL, TENSOR_DOMAIN, Case
from tests.megatron.test_uneven_training import WORKLOAD
from tests.support.expert_layouts import expert_layout

SEQUENCE = ("--sequence-parallel",)
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
FORMATS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--initial-loss-scale", "16", "--loss-scale-window", "2", "--hysteresis", "1"),
    "bf16-distributed": (*RESHARDABLE, "--bf16"),
    "fp32-distributed": RESHARDABLE,
}
ROUTED = (*EXPERTS, *LOSSES["all"])
FURTHER = (*ROUTED, *FURTHER_TOKENS)
SMALL_DEEPSEEK = (*FURTHER, *LATENT, "--v-head-dim", "16")


@dataclass(frozen=True)
class Chain:
    """A model, and layouts of stages through which its checkpoint goes before it comes to one rank.

    Attributes:
        model: arguments.
        layouts: each as a plan, read from a file in a folder.
        alone: plan of the one rank, where Megatron's own attention needs a GPU; ``None``: no plan.
    """

    model: tuple[str, ...]
    layouts: tuple[Callable[[Path], Plan], ...]
    alone: Plan | None = None


def written(*replicas: str, model: tuple[str, ...] = ()) -> tuple[Callable[[Path], Plan], ...]:
    return tuple(Case(text, model).plan for text in replicas)


def with_experts(*names: str, kv_heads: int = 2) -> tuple[Callable[[Path], Plan], ...]:
    def plan(name: str, folder: Path) -> Plan:
        found = expert_layout(name, folder)
        return dataclasses.replace(found, workload=dataclasses.replace(found.workload, kv_heads=kv_heads))

    return tuple(lambda folder, name=name: plan(name, folder) for name in names)


DENSE = (CASES["tensor-parallel-sizes"].plan, OFFLOADED["two-stages"].plan, CASES["samples"].plan)
CHAINS = {
    "dense": Chain(MODEL, DENSE),
    "windows-sinks": Chain((*MODEL, *WINDOW, *SINKS), DENSE),
    "experts": Chain(ROUTED, with_experts("samples", "offload", "slices", "replicas")),
    "further-tokens": Chain((*MODEL, *FURTHER_TOKENS), DENSE),
    "further-experts": Chain(FURTHER, with_experts("ministages", "slices", "dealt")),
    "latent": Chain(
        SMALL_DEEPSEEK,
        with_experts("samples", "dealt", "offload", kv_heads=6),
        proportional_plan(dataclasses.replace(WORKLOAD, kv_heads=6, layers=LAYERS), [[[1]]]),
    ),
    "hybrid": Chain((*MODEL, *HYBRID), written(MINISTAGES, DEPTHS, TENSOR_DOMAIN)),
    "convolutions": Chain((*MODEL, *CONVOLUTION), written(MINISTAGES, DEPTHS, TENSOR_DOMAIN)),
    "delta-nets": Chain((*MODEL, *GPT), written(DEPTHS, MINISTAGES, TENSOR_DOMAIN)),
    "delta-nets-experts": Chain((*MODEL, *QWEN), written(MIXED, INTERLEAVED, MINISTAGES, model=QWEN)),
    "hybrid-experts": Chain((*MODEL, *SPARSE), written(INTERLEAVED, DEPTHS, MINISTAGES, model=SPARSE)),
}
#: Experts, attention, a Mamba layer and a delta net, by the first two layouts and one rank.
IN_CI = {("hybrid-experts", "bf16-distributed")}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(kind, precision, marks=[] if (kind, precision) in IN_CI else pytest.mark.slow)
        for kind in CHAINS
        for precision in FORMATS
    ],
)
def test_a_chain_ends_as_it_begins(kind: str, precision: str, forks: Forks, tmp_path: Path):
    chain = CHAINS[kind]
    skip_what_is_not_there(chain.model)
    words = [
        *job((*chain.model, *FORMATS[precision])),
        "--override-opt-param-scheduler",
        "--save-interval",
        "3",
    ]
    layouts = chain.layouts[:2] if (kind, precision) in IN_CI else chain.layouts
    held: list[Path] = []
    for number, layout in enumerate((*layouts, None, layouts[0])):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = layout(folder) if layout else chain.alone
        loading: list[str | Path] = ["--load", held[-1].parent] if held else []
        args = [
            *words,
            *SEQUENCE,
            "--train-iters",
            "2",
            "--save",
            folder / "saved",
            *loading,
        ]
        log = forks.train(folder, ranks=plan.ranks if plan else 1, args=args, plan=plan)
        assert len(log.iterations) == (0 if held else 2)  # no step between
        held.append(folder / "saved" / "iter_0000002")
        assert differences(held[0], held[-1]) == []
    assert len([name for name in tensors_of(held[0]) if name.startswith("optimizer.state.exp_avg_sq")]) >= 10


@pytest.mark.parametrize("saver", ["stock", pytest.param("plan", marks=pytest.mark.slow)])
def test_weights_go_to_stock_expert_parallelism_and_back(saver: str, forks: Forks, tmp_path: Path):
    """Weights alone: Megatron keeps the optimizer state of experts apart."""
    words = [*job(ROUTED), *("--save-interval", "3", "--no-save-optim", "--no-load-optim"), *SEQUENCE]
    holders = ("stock", "plan") if saver == "stock" else ("plan", "stock")
    held: list[Path] = []
    for holder in holders:
        folder = tmp_path / holder
        folder.mkdir()
        plan = expert_layout("slices", folder) if holder == "plan" else None
        more = [] if plan else ["--expert-model-parallel-size", "2"]
        loading: list[str | Path] = ["--load", held[-1].parent] if held else []
        args = [*words, "--train-iters", "2", "--save", folder / "saved", *more, *loading]
        forks.train(folder, ranks=plan.ranks if plan else 2, args=args, plan=plan)
        held.append(folder / "saved" / "iter_0000002")
    weights = [name for name in differences(*held) if name.startswith(("decoder.", "embedding.", "output_"))]
    assert weights == []
    assert any(".experts." in name for name in tensors_of(held[0]))
