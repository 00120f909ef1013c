"""A Megatron Bridge configuration trains: its flags, scaled down, on CPUs, under an uneven plan."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from megatron_hexi.cli.launch import find_flags
from megatron_hexi.plan import Workload, proportional_plan

FILES = Path(__file__).parents[1] / "unit" / "models" / "bridge"
#: What makes a model small.
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 128,
}
#: Without biases: Megatron's own layers add an expert's bias in place, which autograd refuses on one rank.
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "add_bias_linear": False,
}
#: Latent attention's sizes and a pattern, which the configuration has beside those of `SMALL`; its prediction
#: head trains too.
DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "num_query_groups": 4,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
#: Sizes, which the plan of the test replaces.
UNDIVIDED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
}
#: Kernels of GPUs, which a CPU has not, and its precision.
ON_CPU = {
    "cross_entropy_fusion_impl": "native",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "bf16": False,
}


def _scaled(name: str, folder: Path) -> Path:
    config = yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    config["mixed_precision"] = None
    config["model"] |= SMALL | UNDIVIDED | ON_CPU
    if config["model"].get("num_moe_experts"):
        config["model"] |= EXPERTS
    if name == "deepseek-v3":
        config["model"] |= DEEPSEEK
    config["dataset"] |= {"seq_length": 96, "num_workers": 0}
    config["tokenizer"] |= {"tokenizer_type": "NullTokenizer", "tokenizer_model": None}
    config["train"] |= {"global_batch_size": 4, "micro_batch_size": 1, "train_iters": 10}
    config["validation"]["eval_iters"] = 0
    config["scheduler"]["lr_warmup_iters"] = 2
    config["optimizer"]["use_precision_aware_optimizer"] = False  # Transformer Engine's
    config["optimizer"] |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"))
    path = folder / "run_config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("llama3-8b", {"kv_heads": 2, "head_dim": 16}),
        pytest.param("qwen3-30b-a3b", {"kv_heads": 2, "head_dim": 16}, marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", {"kv_heads": 2, "head_dim": 16}, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", {"kv_heads": 4, "head_dim": 24, "value_dim": 16}, marks=pytest.mark.slow),
    ],
)
def test_a_configuration_trains(name, shapes, forks, tmp_path):
    path = _scaled(name, tmp_path)
    plan = proportional_plan(Workload(96, 4, **shapes), [[[3, 2], [1]]])
    flags = find_flags(plan, "plan.yaml", str(path), ["--mock-data", "--log-interval", "1"])
    assert "--hexi-plan" in flags
    log = forks.train(tmp_path, ranks=3, args=flags[2:], plan=plan)
    assert len(log.losses) == 10
    assert all(loss == pytest.approx(math.log(128), abs=0.5) for loss in log.losses)
    rates = [float(rate) for rate in re.findall(r"learning rate: (\S+)", log.output)]
    assert rates[1] == pytest.approx(2 * rates[0])  # the warm-up
    assert rates[1:] == sorted(rates[1:], reverse=True)
