"""An entry point: examples/own_loop.py with layers of Transformer Engine, in one iteration.

The arguments are the plan, fp32 or a recipe of fp8, and the number of stages.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_query_groups": 4, "add_bias_linear": False}
FP8 = {"fp8": "hybrid", "bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


def by_size(weight: torch.Tensor) -> torch.Tensor:
    """Initialise a weight by nothing but its size."""
    random = torch.Generator().manual_seed(weight.numel())
    with torch.no_grad():
        return weight.copy_(torch.randn(weight.shape, generator=random) * 0.05)


def main() -> None:
    """Train, and write ``own-RANK.pt``: gradients by name."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    sys.modules.pop("megatron_hexi.adaptor").patches.remove()  # of Megatron-LM's loop
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import own_loop  # type: ignore[import-not-found]

    plan, precision, stages = sys.argv[1:4]
    dist.init_process_group("gloo")
    vars(own_loop)["get_gpt_layer_local_spec"] = get_gpt_layer_with_transformer_engine_spec
    vars(own_loop)["DistributedDataParallelConfig"] = lambda: DistributedDataParallelConfig(
        grad_reduce_in_fp32=True
    )
    vars(own_loop)["OptimizerConfig"] = partial(own_loop.OptimizerConfig, bf16=precision != "fp32")
    changed: dict[str, Any] = {**SIZES, "pipeline_model_parallel_size": int(stages)}
    if precision != "fp32":
        changed |= FP8 | {"fp8_recipe": precision}
    methods: Any = {"init_method": by_size, "output_layer_init_method": by_size}
    _, model, _ = own_loop.train(plan, 1, **methods, **changed)
    found = {}
    for name, weight in model.module.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:  # a stage counts its own layers from 0
            parts[2] = str(model.module.decoder.layers[int(parts[2])].layer_number - 1)
        found[".".join(parts)] = weight.main_grad.double()
    torch.save(found, f"own-{os.environ['RANK']}.pt")
