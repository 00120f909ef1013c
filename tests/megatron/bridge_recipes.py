"""A script that checks each of Bridge's recipes of Qwen models with vision, on small weights, against a plan.

As a user does who makes a plan: parallel sizes other than the plan's are left out of the recipe.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PLAN = """\
version: 2
workload: {{seq_length: {length}, heads: 4, kv_heads: 2, head_dim: 16{experts}}}
job: {{micro_batch_size: {samples}, global_batch_size: {batch}}}
replicas:
- stages:
  - domains:
    - groups:
      - segments: [[0, {length}]]
        members:
        - {{ranks: [0], tokens: {first}, heads: [0, 3], patches: 2}}
        - {{ranks: [1], tokens: {second}, heads: [3, 4], patches: 1}}
"""


def recipes() -> Iterator[tuple[str, Any]]:
    """Yield the recipes by name, without Bridge's list of all recipes, which needs diffusers."""
    import megatron.bridge as bridge

    for package in ("recipes", "recipes.qwen_vl", "recipes.qwen_vl.h100"):
        module = types.ModuleType(f"megatron.bridge.{package}")
        module.__path__ = [str(Path(*bridge.__path__, *package.split(".")))]
        sys.modules[module.__name__] = module
    for name in ("qwen25_vl", "qwen3_vl"):
        module = importlib.import_module(f"megatron.bridge.recipes.qwen_vl.h100.{name}")
        for recipe, build in inspect.getmembers(module, inspect.isfunction):
            if recipe.endswith("_config") and build.__module__ == module.__name__:
                yield recipe, build


def main() -> None:
    from megatron.bridge import AutoBridge

    from megatron_hexi.errors import HexiError
    from megatron_hexi.megatron.arguments import add_hexi_arguments
    from megatron_hexi.megatron.bridge_job import hold_configuration
    from megatron_hexi.megatron.session import set_given_plan
    from tests.megatron.bridge_models_ranks import write_imported

    out = Path(sys.argv[1]) / os.environ["RANK"]
    out.mkdir()
    write_imported(out)
    read, found = AutoBridge.from_hf_pretrained, {}
    for name, build in recipes():
        kind = "vision" if "qwen25" in name else "vision3e" if "a3b" in name or "a22b" in name else "vision3"
        AutoBridge.from_hf_pretrained = lambda *_args, kind=kind, **_kwargs: read(str(out / kind))
        config = build()
        model, packs = config.model, getattr(config.dataset, "enable_in_batch_packing", False)
        model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
        model.expert_model_parallel_size, model.sequence_parallel = 1, False
        together = config.train.micro_batch_size if packs else 1
        length = model.seq_length * together
        path = out / f"{name}.yaml"
        path.write_text(
            PLAN.format(
                length=length,
                first=length - 100,
                second=100,
                experts=f", experts: {model.num_moe_experts}" if model.num_moe_experts else "",
                samples=config.train.micro_batch_size // together,
                batch=config.train.global_batch_size // together,
            )
        )
        set_given_plan(None)
        options = add_hexi_arguments(ArgumentParser(add_help=False)).parse_args(["--hexi-plan", str(path)])
        try:
            hold_configuration(config, options, torch.device("cpu"))
        except HexiError as refused:
            found[name] = str(refused)
        else:
            found[name] = ""
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
