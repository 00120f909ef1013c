"""Modules that are computed again save the bytes at the peak that the cost model says."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import read_plan
from tests.megatron.conftest import job
from tests.megatron.forked import Forks
from tests.megatron.held_bytes import held
from tests.megatron.option_cases import NORMED_LATENT
from tests.megatron.test_held_bytes import BATCH, CLUSTER, DEEP, HEADING, SEQ_LENGTH, WORDS
from tests.megatron.test_stages_training import MICRO_BATCHES

EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "192", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", "256"),
)
MODELS = {"dense": (), "experts": EXPERTS, "latent": NORMED_LATENT}
CASES = (
    *(("dense", modules) for modules in ("layernorm", "mlp", "core_attn", "layernorm, mlp, core_attn")),
    *(("experts", modules) for modules in ("shared_experts", "moe", "layernorm, moe, core_attn")),
    *(("latent", modules) for modules in ("mla_up_proj", "mla_up_proj, core_attn, layernorm, mlp")),
)


@pytest.fixture(scope="module")
def peaks(forks: Forks, tmp_path_factory: pytest.TempPathFactory):
    """The peak of each rank with some modules computed again, and what the cost model says, MB."""

    @functools.cache
    def run(name: str, recompute: str) -> list[tuple[float, float]]:
        folder = tmp_path_factory.mktemp("held")
        words = [*job((*WORDS, *MODELS[name]))]
        (folder / "model.args").write_text(" ".join(words))
        path = folder / "plan.yaml"
        text = HEADING.replace("PARALLEL", "sequence_parallel: false") + DEEP.replace("RECOMPUTE", recompute)
        if name == "latent":
            text = text.replace("kv_heads: 2, head_dim: 16", "kv_heads: 8, head_dim: 16, value_dim: 24")
        path.write_text(text)
        plan = read_plan(path)
        (folder / "cluster.yaml").write_text(CLUSTER.replace("gpus: 4", f"gpus: {plan.ranks}"))
        training: list[str | Path] = ["--train-iters", "2", "--hexi-plan", path]
        outcome = forks.launch(
            *(folder,),
            ranks=plan.ranks,
            args=[*words, *training],
            entry="tests.megatron.held_bytes",
            timeout=280,
        )
        assert outcome.succeeded, outcome.why()
        terms = Job(
            model=read_model(str(folder / "model.args")),
            seq_length=SEQ_LENGTH,
            micro_batch_size=BATCH,
            global_batch_size=BATCH * MICRO_BATCHES,
            precision="fp32",
            unfused=("loss", "norms"),
        )
        cost = CostModel(terms, read_cluster(folder / "cluster.yaml")).estimate(plan)
        return [
            (one.peak / 1e6, (rank.memory.total - rank.memory.reserve) / 1e6)
            for rank, output in zip(cost.ranks, outcome.output, strict=True)
            for one in held(output)
        ]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules"), CASES)
def test_modules_save_what_the_cost_model_says(name: str, modules: str, peaks):
    (plain, said_plain), *_ = peaks(name, "none")
    (found, said), *_ = peaks(name, f"[{modules}]")
    saved, said_saved = plain - found, said_plain - said
    print(f"{name}, {modules}: {found:.2f} MB, predicted {said:.2f}; saved {saved:.2f}, {said_saved:.2f}")
    assert found == pytest.approx(said, rel=0.08 if name == "experts" else 0.05)
    assert saved == pytest.approx(said_saved, rel=0.1, abs=0.02 * plain)
