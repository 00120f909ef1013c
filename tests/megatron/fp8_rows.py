"""An entry point: Transformer Engine, which asserts sizes, multiplies with the rows of random plans."""

from __future__ import annotations

import math
from random import Random

import torch

from megatron_hexi.megatron.session import local_shard
from megatron_hexi.megatron.stages.stages_session import schedules_of
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Workload
from megatron_hexi.plan.terms import fp8_row_multiple
from tests.megatron.fp8_cases import RECIPES
from tests.support.stage_plans import stage_plan

PLANS, COLUMNS = 200, 128


def main() -> None:
    """Multiply with the rows of all units; print how many sizes there were, and how many fail unpadded."""
    from transformer_engine.common import recipe as te_recipes

    made = {
        "tensorwise": te_recipes.Float8CurrentScaling(),
        "delayed": te_recipes.DelayedScaling(),
        "blockwise": te_recipes.Float8BlockScaling(),
        "mxfp8": te_recipes.MXFP8BlockScaling(),
    }
    assert made.keys() == set(RECIPES)
    padded: set[tuple[str, int, int]] = set()
    bare: set[tuple[str, int, int]] = set()
    for seed in range(PLANS):
        random = Random(seed)
        workload = Workload(random.randint(1, 700), 8, 8, head_dim=4, layers=random.randint(1, 4))
        plan = stage_plan(random, workload, micro_batch_size=2, ranks=random.randint(2, 8))
        sequence_parallel = random.random() < 0.5
        mesh = Mesh(plan, 2, sequence_parallel=sequence_parallel)
        for unit in mesh.units:
            parts = unit.width if sequence_parallel else 1
            for name in RECIPES:
                for found, multiple in ((padded, fp8_row_multiple(name, parts)), (bare, parts)):
                    if found is bare and seed > PLANS // 20:
                        continue  # nearly all of them fail
                    shard = local_shard(schedules_of(mesh, unit)(), multiple, torch.device("cpu"))
                    found.add((name, shard.rows // parts, parts))
    for case in padded:
        multiply(made[case[0]], *case[1:])
    failed = 0
    for case in bare:
        try:
            multiply(made[case[0]], *case[1:])
        except (ValueError, AssertionError):
            failed += 1
    print(f"{len(padded)} sizes, {failed} of {len(bare)} fail without padding")
    assert failed > len(bare) // 2


def multiply(recipe: object, rows: int, parts: int) -> None:
    """Multiply a rank's rows, and those that its unit gathers, forward and backward.

    Raises:
        ValueError, AssertionError: Transformer Engine refuses the sizes, or the unit would gather in bf16.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    layer = te.Linear(COLUMNS, COLUMNS, bias=False, device="cpu", params_dtype=torch.bfloat16)
    for count in {rows, rows * parts}:
        inputs = torch.ones(count, 1, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
        assert_dim_for_fp8_exec(inputs, layer.weight)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            layer(inputs).sum().backward()
        assert inputs.grad is not None
        assert math.isfinite(float(inputs.grad.sum()))
    input_quantizer = layer.quantizers["scaling_fwd"][0]
    if isinstance(input_quantizer, Float8BlockQuantizer) and parts > 1:
        assert input_quantizer.is_quantizable(torch.empty(rows, 1, COLUMNS)), "gathered in bf16"
