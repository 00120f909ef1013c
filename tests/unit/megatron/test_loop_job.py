"""The job of a loop of one's own is checked against its plan, and refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.loop_job import LoopJob, hold_loop
from megatron_hexi.megatron.session import given_plan, set_given_plan

REPOSITORY = Path(__file__).parents[3]
MODEL = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2}


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    yield
    set_given_plan(None)


def job(batch: int = 8, arguments: dict[str, Any] | None = None, **model: Any) -> LoopJob:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**{**MODEL, "attention_dropout": 0.0, "hidden_dropout": 0.0} | model)
    return LoopJob(config, 101, 2, batch, arguments or {})


def hold(one: LoopJob, plan: Path = REPOSITORY / "examples" / "own_loop.yaml") -> dict[str, Any]:
    held = hold_loop(plan, one, torch.device("cpu"))
    return {name: value for _, name, value in held.settings}


def test_the_plan_s_sizes_and_mean_are_what_the_model_lacks():
    assert hold(job()) == {"calculate_per_token_loss": True, "context_parallel_size": 4}
    given = given_plan()
    assert given is not None
    assert given.terms.layers == 2
    assert not given.terms.has_documents


def test_a_plan_that_divides_images_is_for_a_loop_that_encodes_them(tmp_path: Path):
    text = (REPOSITORY / "examples" / "own_loop.yaml").read_text()
    plan = tmp_path / "plan.yaml"
    plan.write_text(text.replace("- ranks: [3]", "- {ranks: [3], patches: 2}"))
    hold(dataclasses.replace(job(), images=True), plan)
    with pytest.raises(HexiError, match=r"ranks \[3\] have patches: 2, and the job encodes no images; make"):
        hold(job(), plan)


def test_a_stage_without_layers_is_for_a_job_that_encodes_images(tmp_path: Path):
    head, _, _ = (REPOSITORY / "examples" / "own_loop.yaml").read_text().partition("\nreplicas:")
    stages = "[{layers: [0, 0], domains: [{ranks: [0]}]}, {layers: [0, 2], domains: [{ranks: [1]}]}]"
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"{head}\nreplicas:\n- stages: {stages}\n")
    with pytest.raises(HexiError, match=r"ranks \[0\] have layers: \[0, 0\], and the job encodes no images"):
        hold_loop(plan, job(), torch.device("cpu"), stages=True)


def test_an_activation_is_read_as_its_flag():
    """Megatron's arguments refuse GPT-OSS's offset without --quick-geglu."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    gated: dict[str, Any] = {
        "gated_linear_unit": True,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": True,
    }
    assert hold(job(activation_func=quick_gelu, add_bias_linear=False, **gated))


def test_what_the_plan_decides_is_set_in_each_section_that_has_it():
    @dataclasses.dataclass
    class Buckets:
        average_in_collective: bool = True
        use_distributed_optimizer: bool = True

    @dataclasses.dataclass
    class Rates:
        lr: float = 1e-3
        use_distributed_optimizer: bool = False

    sections = (Rates(use_distributed_optimizer=True), Buckets())
    one = dataclasses.replace(job(), sections=sections)
    held = hold_loop(REPOSITORY / "examples" / "own_loop.yaml", one, torch.device("cpu"))
    held.apply()
    assert one.model.context_parallel_size == 4
    assert held.args.lr == 1e-3
    assert held.args.use_distributed_optimizer  # one of the sections states it
    assert held.args.ddp_average_in_collective is False
    assert sections[1] == Buckets(average_in_collective=False)


def test_documents_are_known_to_the_session():
    one = LoopJob(job().model, 101, 1, 4, {"dataloader_inter_document_masking": True})
    hold(one)
    given = given_plan()
    assert given is not None
    assert given.terms.has_documents


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 3}, "the job has --num-layers 3"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout does not work with --hexi-plan"),
        ({"context_parallel_size": 2}, "the job has --context-parallel-size 2"),
        ({"batch": 6}, "the global batch has 6"),
        ({"fp16": True}, "fp16: its loss scale needs Megatron-LM's loop"),
        ({"arguments": {"seed_": 1}}, "Megatron has no argument seed_"),
        ({"arguments": {"num_layers": 2}}, "num_layers is a field of the job or its model"),
        ({"arguments": {"hexi_record": "r"}}, "--hexi-record: needs Megatron-LM's loop"),
        ({"arguments": {"ddp_average_in_collective": True}}, "which your loop has to carry out"),
    ],
)
def test_another_job_is_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(HexiError, match=re.escape(message)):
        hold(job(**wrong))


def test_two_interleaved_stages_overlap_their_communication(tmp_path: Path):
    """Else Megatron takes gradients for activations, from the third micro-batch on."""
    head, _, _ = (REPOSITORY / "examples" / "own_loop.yaml").read_text().partition("\nreplicas:")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        head.replace("layers: 2", "layers: 4") + "\nreplicas:\n- stages: [{domains: [{ranks: [0, 1]}]}]\n"
    )
    sizes: dict[str, Any] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    one = job(pipeline_dtype=torch.float32, num_layers=4, **sizes)
    with pytest.raises(HexiError, match=r"^overlap_p2p_comm False: .*; give overlap_p2p_comm True"):
        hold(one, plan)


def test_stages_with_layers_of_their_own_are_refused(tmp_path: Path):
    plan = tmp_path / "plan.yaml"
    stages = "[{layers: [0, 1], domains: [{ranks: [0, 1]}]}, {layers: [1, 2], domains: [{ranks: [2, 3]}]}]"
    workload = "{seq_length: 101, heads: 6, kv_heads: 2, head_dim: 16, layers: 2}"
    plan.write_text(f"version: 2\nworkload: {workload}\nreplicas: [{{stages: {stages}}}]\n")
    with pytest.raises(HexiError, match="its stages have layers of their own, which need Megatron-LM's loop"):
        hold(job(), plan)
