"""Plans in which latent columns travel: their file, and what is refused, by name."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.options.plan_job import check_workload
from megatron_hexi.plan import LatentColumns, Workload, proportional_plan, read_plan, write_plan
from tests.support.costs import tiny_job

WORKLOAD = Workload(64, 4, 4, 16, value_dim=24, latent_exchange=LatentColumns(32, 8))
#: A job of the same model.
ARGS = {
    "hexi_plan": "plan.yaml",
    "multi_latent_attention": True,
    "group_query_attention": False,
    "seq_length": 64,
    "encoder_seq_length": None,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": None,
    "hidden_size": 64,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "kv_lora_rank": 32,
    "num_layers": 2,
    "num_experts": None,
    "tensor_model_parallel_size": 1,
}


def planned(**changes):
    return proportional_plan(replace(WORKLOAD, **changes), [[[1, 1], [1]]])


def test_a_file_keeps_the_columns(tmp_path):
    write_plan(planned(), tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == planned()
    assert "latent_exchange" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 2}, r"workload\.latent_exchange is given, and 4 heads share 2 KV heads"),
        ({"head_dim": 8}, r"rotary_dim is 8, a key has 8 columns; give fewer"),
    ],
)
def test_columns_of_other_attention_are_refused(changes, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        write_plan(planned(**changes), tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_latent_attention": False, "kv_channels": 16}, "the job's attention does not have"),
        ({"kv_lora_rank": 16}, r"latent_exchange\.kv_rank is 32, but the job has --kv-lora-rank 16"),
        ({"mla_down_proj_fusion": True}, "leave out --mla-down-proj-fusion"),
        ({"hybrid_layer_pattern": "*-*-"}, "without --hybrid-layer-pattern"),
    ],
)
def test_jobs_that_cannot_are_refused(changes, message):
    check_workload(Namespace(**ARGS), planned())
    with pytest.raises(PlanError, match=message):
        check_workload(Namespace(**ARGS | changes), planned())


def test_a_job_without_latent_attention_is_refused():
    with pytest.raises(HexiError, match="leave it out: tiny has no latent attention"):
        tiny_job(latent_exchange=True)
