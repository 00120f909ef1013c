"""The optimizer's step on the host, with weights, state and gradients in host memory.

As in Megatron's ``HybridDeviceOptimizer`` (``--optimizer-cpu-offload``), torch's fused optimizer computes the
step. Megatron's keeps a copy of all its parameters on the device, so it cannot hold the plan's shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.megatron.stages.optimizer_state import state_names
from megatron_hexi.runtime.host_memory import HostMemory


def host_optimizer(groups: list[dict[str, Any]], config: Any, host: HostMemory) -> torch.optim.Optimizer:
    """Return torch's adam or sgd over Megatron's parameter groups in host memory, with its state there."""
    made: torch.optim.Optimizer
    if config.optimizer == "adam":
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        betas = config.adam_beta1, config.adam_beta2
        made = kind(
            groups,
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=betas,
            eps=config.adam_eps,
            fused=True,  # no copies besides the state
        )
    else:
        made = torch.optim.SGD(
            groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum
        )
    for group in made.param_groups:
        for parameter in group["params"]:
            state = {name: host.empty(parameter.shape, torch.float32) for name in state_names(config)}
            if config.optimizer == "adam":
                state["step"] = torch.tensor(0.0)
            made.state[parameter] = state
    return made


def host_norm(gradients: Sequence[Tensor], group: Any, device: torch.device) -> float:
    """Return the norm of all gradients of the job, where this rank's are on the host.

    All ranks must call it; Megatron computes the norms of the others in the same sum of squares.
    """
    squares = sum(
        float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients
    )
    total = torch.tensor([squares], dtype=torch.float32, device=device)
    dist.all_reduce(total, group=group)
    return float(total) ** 0.5


def clip_on_host(parameters: Sequence[Parameter], most: float, norm: float) -> None:
    """Scale gradients down, as Megatron does, where their norm exceeds the limit."""
    factor = most / (norm + 1.0e-6)
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= factor


def unscale_on_host(gradients: Sequence[Tensor], factor: Tensor) -> float:
    """Multiply gradients, as Megatron does; return 1.0 if one is infinite or not a number, else 0.0.

    Args:
        gradients: gradients of this rank, in fp32; changed in place.
        factor: the inverse of the loss scale, [1].
    """
    found_inf = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, factor.cpu())
    return float(found_inf)
