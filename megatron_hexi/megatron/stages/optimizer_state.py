"""The optimizer's state of owned slabs, in the layouts that Megatron's own optimizers save and load.

All of them name a state by the weight that it belongs to and store it by boxes, so a slab is as good a box as
Megatron's. They differ in where the step count stands and in what the fp32 weights are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import Slab

#: What the fp32 weights of a checkpoint of Megatron's distributed optimizer are called, by its format.
_MASTERS = {"fully_reshardable": "param", "fully_sharded_model_space": "fp32_param"}
#: What the fp32 weights are called in any checkpoint.
MASTER_NAMES = tuple(_MASTERS.values())


def state_names(config: Any) -> tuple[str, ...]:
    """What the optimizer keeps of each weight, beside the weight and a count of steps.

    Args:
        config: Megatron's, of adam or sgd.
    """
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def master_name(metadata: dict[str, Any] | None, is_half: bool) -> str | None:
    """What the fp32 weights are called in a checkpoint; ``None`` where it has none.

    Args:
        metadata: of the checkpoint.
        is_half: whether the model's own weights are not fp32.

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
    """The states of slabs as Megatron stores tensors, by the slab's number and the state's name."""
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
    """What an optimizer hands to Megatron for a checkpoint.

    Args:
        tensors: as `sharded_state` gives them.
        groups: parameter groups, without parameters.
        step: how many steps were done.
        metadata: of the checkpoint.
        is_half: whether the model's own weights are not fp32.
        scaler: the loss scaler's state; ``None`` where losses are not scaled.
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
    """The states by slab, the parameter groups and the step count of what Megatron loaded."""
    inner = state.get("optimizer", state)
    tensors = state["param_state"]["pieces"] if "param_state" in state else state["pieces"]
    groups = inner["param_groups"]
    step = inner["state"].get("common_step") if "state" in inner else groups[0].get("step")
    return tensors, groups, int(step or 0)
