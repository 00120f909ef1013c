"""Our entry point with the gradients' norm in fp64: torch's in fp32 is off by 1e-5 for a million elements."""

from __future__ import annotations

from typing import Any

import torch


def l2_norm(
    chunk_size: int, overflow: Any, tensors: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """In place of Megatron's `local_multi_tensor_l2_norm`."""
    del chunk_size, overflow
    assert not per_tensor
    squares = [one.double().square().sum() for one in tensors[0]]
    return torch.stack(squares).sum().sqrt().float(), None


def main() -> None:
    """Train."""
    from megatron.core.optimizer import clip_grads

    from megatron_hexi import pretrain_gpt

    assert clip_grads.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm"
    clip_grads.l2_norm_impl = l2_norm
    pretrain_gpt.main()
