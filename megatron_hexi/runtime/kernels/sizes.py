"""Values of another size than keys (multi-latent attention), for kernels that take one size for all.

The smaller ones are padded with zeros: zeros in queries and keys add nothing to a score, zeros in values give
zeros in the output, which are cut off. Shape letters as in `base`; Dk of queries and keys, Dv of values.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from megatron_hexi.runtime.kernels.base import Kernel


def forward_of_sizes(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`Kernel.forward` with query [B, H, Q, Dk], key [B, K, S, Dk], value [B, K, S, Dv]; output as Dv."""
    width = max(key.shape[3], value.shape[3])
    q, k, v = (_padded(tensor, width) for tensor in (query, key, value))
    output, log_sum_exp = kernel.forward(q, k, v, causal=causal, scale=scale)
    return output[..., : value.shape[3]], log_sum_exp


def backward_of_sizes(
    kernel: Kernel,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`Kernel.backward` with sizes as in `forward_of_sizes`."""
    width = max(key.shape[3], value.shape[3])
    grad, q, k, v, out = (_padded(tensor, width) for tensor in (grad_output, query, key, value, output))
    grads = kernel.backward(grad, q, k, v, out, log_sum_exp, causal=causal, scale=scale)
    grad_query, grad_key, grad_value = (
        grad[..., : tensor.shape[3]] for grad, tensor in zip(grads, (query, key, value), strict=True)
    )
    return grad_query, grad_key, grad_value


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[3]
    return pad(tensor, (0, missing)) if missing else tensor
