"""Our entry point, whose ranks write what Transformer Engine computed in fp8, and with which scales.

``--fault NAME`` plants a fault; ``--pad RECIPE`` pads shards in bf16 as a recipe of fp8 needs;
``--swap FILE`` swaps to the plans of a file (`swapping`).
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.megatron import batch, fp8_scales, groups, plan_arguments
from megatron_hexi.megatron.stages import stages_session
from megatron_hexi.mesh import Mesh, mesh
from megatron_hexi.plan.terms import fp8_row_multiple
from tests.megatron import swapping


def _maxima_of_one_rank() -> None:
    vars(fp8_scales)["dist"] = SimpleNamespace(
        all_reduce=lambda *_: None,
        all_gather_object=dist.all_gather_object,
        get_world_size=dist.get_world_size,
        ReduceOp=dist.ReduceOp,
    )


def _rows_as_in_bf16() -> None:
    for module in (plan_arguments, mesh):
        vars(module)["fp8_row_multiple"] = lambda recipe, parts: parts


def _padding_has_losses() -> None:
    original = batch.cut_batch

    def cut_batch(given: Any, session: Any) -> Any:
        cut = original(given, session)
        if cut["loss_mask"] is not None:
            cut["loss_mask"].fill_(1)
        return cut

    vars(batch)["cut_batch"] = cut_batch


FAULTS = {
    "maxima-of-one-rank": _maxima_of_one_rank,
    "rows-as-in-bf16": _rows_as_in_bf16,
    "padding-has-losses": _padding_has_losses,
}


def _pad(recipe: Any) -> None:
    """Pad shards in bf16 as a recipe of fp8 needs."""
    original = Mesh.row_parts
    Mesh.row_multiple = lambda self, unit: fp8_row_multiple(recipe, original(self, unit))  # type: ignore[method-assign]
    session = vars(groups)["local_shard"]
    vars(stages_session)["local_shard"] = lambda schedule, parts, device: session(
        schedule, fp8_row_multiple(recipe, parts), device
    )


def main() -> None:
    """Train, and write ``fp8-RANK.pt``: whether each product of this rank was in fp8, and its scales."""
    options = (("--fault", lambda name: FAULTS[name]()), ("--pad", _pad), ("--swap", swapping.install))
    for option, change in options:
        if option in sys.argv:
            place = sys.argv.index(option)
            change(sys.argv[place + 1])
            del sys.argv[place : place + 2]
    from megatron.training import training

    from megatron_hexi.pretrain_gpt import main as pretrain

    train = training.train

    def train_and_write(forward_step: Any, model: list[Any], *rest: Any, **more: Any) -> Any:
        done = train(forward_step, model, *rest, **more)
        found = {}
        for module, names in fp8_scales._named_products(model):
            states = [module.fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd")]
            scales = [getattr(state, "scale", torch.empty(0)).view(len(names), -1) for state in states]
            for number, name in enumerate(names):
                found[name] = {"fp8": module.fp8, "scales": torch.cat([one[number] for one in scales])}
        torch.save(found, f"fp8-{os.environ['RANK']}.pt")
        return done

    vars(training)["train"] = train_and_write
    pretrain()
