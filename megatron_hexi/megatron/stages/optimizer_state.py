"""The optimizer's state of owned slabs, in the layouts that Megatron's own optimizers save and load.

All of them name a state by its weight and store it by boxes, and a slab is a box like Megatron's. They differ
in the place of the step count and in the name of the fp32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import Slab

#: Names of the fp32 weights in checkpoints of Megatron's distributed optimizer, by format.
_MASTERS = {"fully_reshardable": "param", "fully_sharded_model_space": "fp32_param"}
#: Names of the fp32 weights in any checkpoint.
MASTER_NAMES = tuple(_MASTERS.values())


def state_names(config: Any) -> tuple[str, ...]:
    """Return the names of the state of each weight in adam or sgd, without weight and step count."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def master_name(metadata: dict[str, Any] | None, is_half: bool) -> str | None:
    """Return the name of the fp32 weights in a checkpoint; ``None`` where it has none beside the model's.

    Raises:
        PlanError: the format depends on the layout that it was saved under.
    """
    kind = (metadata or {}).get("distrib_optim_sharding_type")
    if kind is None:
        return "fp32_param" if is_half else None
    if kind not in _MASTERS:
        raise PlanError(
            f"the checkpoint has the distributed optimizer's state in the format {kind}, which only the "
            "layout that saved it can load; save it with --dist-ckpt-optim-fully-reshardable, or give "
            "--no-load-optim"
        )
    return _MASTERS[kind]


def sharded_state(slabs: Sequence[Slab], states: Sequence[dict[str, Tensor]]) -> dict[int, dict[str, Any]]:
    """Return the states of slabs as Megatron stores tensors, by slab number and state name."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {
        number: {
            name: ShardedTensor(
                f"optimizer.state.{name}.{slab.key}",
                tensor,
                tensor.dtype,
                tuple(tensor.shape),
                slab.shape,
                tuple(start for start, _ in slab.cell),
                None,
            )
            for name, tensor in state.items()
        }
        for number, (slab, state) in enumerate(zip(slabs, states, strict=True))
    }


def state_document(
    tensors: dict[int, dict[str, Any]],
    groups: list[dict[str, Any]],
    step: int,
    metadata: dict[str, Any] | None,
    is_half: bool,
    scaler: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return an optimizer's state dict for a checkpoint of Megatron, with the tensors of `sharded_state`.

    Groups are without parameters; the scaler's state is ``None`` where losses are not scaled.
    """
    kind = (metadata or {}).get("distrib_optim_sharding_type")
    scaling = {} if scaler is None else {"grad_scaler": scaler}
    if kind is not None:  # Megatron's distributed optimizer
        groups = [{**group, "step": step} for group in groups]
        return {
            "optimizer": {"param_groups": groups},
            **scaling,
            "param_state": {"pieces": tensors},
            "param_state_sharding_type": kind,
        }
    inner = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    if is_half:  # its optimizer with fp32 copies of half-precision weights
        return {"optimizer": inner, **scaling, "pieces": tensors}
    return {**inner, "pieces": tensors}


def read_document(
    state: dict[str, Any],
) -> tuple[dict[int, dict[str, Tensor]], list[dict[str, Any]], int]:
    """Return states by slab number, parameter groups and step count of a state dict that Megatron loaded."""
    inner = state.get("optimizer", state)
    tensors = state["param_state"]["pieces"] if "param_state" in state else state["pieces"]
    groups = inner["param_groups"]
    step = inner["state"].get("common_step") if "state" in inner else groups[0].get("step")
    return tensors, groups, int(step or 0)
