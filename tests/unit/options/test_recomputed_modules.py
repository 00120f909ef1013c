"""Modules that a job cannot compute again are refused by name, in its flags and in stages of its plan."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_hexi.errors import PlanError
from megatron_hexi.options.plan_job import check_recomputation
from megatron_hexi.plan import LatentColumns, Workload, proportional_plan

PLAN = proportional_plan(Workload(seq_length=64, heads=4, kv_heads=4, head_dim=16), [[[1, 1], [1]]])
COLUMNS = replace(PLAN.workload, latent_exchange=LatentColumns(32, 8))
ARGS = {
    "hexi_plan": "plan.yaml",
    "recompute_activations": False,
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn"],
    "fp8": None,
    "fp8_recipe": "delayed",
    "add_bias_linear": False,
    "moe_grouped_gemm": True,
    "multi_latent_attention": True,
}


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("mlp", {"add_bias_linear": True}, "leave mlp out, or give --disable-bias-linear"),
        ("moe_act", {"moe_grouped_gemm": False}, "leave moe_act out of the list, or give --moe-grouped-gemm"),
        ("moe_act", {"fp8": "hybrid"}, "leave moe_act out of the list, or give --fp8-recipe"),
        ("layernorm", {"fp8": "hybrid"}, "leave layernorm out of the list, or give --fp8-recipe"),
        (
            "mla_up_proj",
            {"multi_latent_attention": False},
            "leave mla_up_proj out of the list, or give --multi-latent-attention",
        ),
    ],
)
def test_a_module_is_refused_where_it_cannot_be_computed_again(module, changes, message):
    check_recomputation(Namespace(**ARGS | {"recompute_modules": [module]}), PLAN)
    with pytest.raises(PlanError, match=f"--recompute-modules: .*{message}"):
        check_recomputation(Namespace(**ARGS | {"recompute_modules": [module]} | changes), PLAN)
    (replica,) = PLAN.replicas
    stages = tuple(replace(stage, recompute=(module,)) for stage in replica.stages)
    plan = replace(PLAN, replicas=(replace(replica, stages=stages),))
    check_recomputation(Namespace(**ARGS), plan)
    with pytest.raises(PlanError, match=rf"plan.yaml: replicas\[0\].stages\[0\].recompute: .*{message}"):
        check_recomputation(Namespace(**ARGS | changes), plan)


def test_matrices_up_are_not_computed_again_where_latent_columns_travel():
    with pytest.raises(PlanError, match=r"latent columns travel.*leave mla_up_proj out"):
        check_recomputation(
            Namespace(**ARGS | {"recompute_modules": ["mla_up_proj"]}), replace(PLAN, workload=COLUMNS)
        )
