"""Packages of state-space and delta-net layers for a CPU: what Megatron imports of them, in PyTorch.

Their own kernels are written for GPUs. Megatron looks for the packages when it is imported, so the modules
are there before. Arguments that Megatron's training does not give are not taken.

Norms and activations hold no more memory than the fused kernels of a GPU. Megatron compiles these functions,
or takes them from Transformer Engine or apex. A CPU runs them one operation after another: an RMSNorm keeps
its normalised input besides input and output, and the gradient of an activation makes up to six tensors of
its size. Here they do not, so that memory counted on a CPU is what a plan says of a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_hexi.patching import patched
from megatron_hexi.platform.cpu_scans import causal_convolution, delta_rule_scan, state_space_scan


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm over groups of channels, of an input that may be gated (``layernorm_gated.RMSNorm``).

    Args:
        group_size: channels that are normalised together; ``None``: all.
        norm_before_gate: must be false, as Megatron gives it.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise the last axis.

        Args:
            x: [..., hidden].
        """
        wide = _wide(x)
        if z is not None:
            wide = wide * functional.silu(_wide(z))
        groups = wide.unflatten(-1, (-1, self.group_size))
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normal.flatten(-2) * self.weight).to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Return the state-space scan of heads, [B, S, H, P], with skip weights and gate.

    Args:
        x: [B, S, H, P].
        dt: [B, S, H].
        A: [H], negative.
        B: [B, S, G, N].
        C: [B, S, G, N].
        chunk_size: not used: it changes rounding only.
        D: [H] or [H, P].
        z: [B, S, H, P].
        dt_bias: [H].
        dt_softplus: whether steps are the softplus of `dt`.
        seq_idx: number of each token's document, [B, S].
    """
    wide, steps = _wide(x), _wide(dt)
    if dt_bias is not None:
        steps = steps + dt_bias
    if dt_softplus:
        steps = functional.softplus(steps)
    y = state_space_scan(wide, steps, A, _wide(B), _wide(C), seq_idx)
    if D is not None:
        y = y + wide * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        y = y * functional.silu(_wide(z))
    return y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Return the convolution and the gated scan of a Mamba-2 layer, [B, S, H P].

    Args:
        zxbcdt: gate, input, keys, queries and steps, [B, S, 2 H P + 2 G N + H].
        conv1d_weight: [H P + 2 G N, W].
        conv1d_bias: [H P + 2 G N].
        dt_bias: [H].
        A: [H], negative.
        D: [H], or [H, P] without `headdim`.
        chunk_size: not used: it changes rounding only.
        seq_idx: number of each token's document, [B, S].
        activation: must be ``silu``.
        headdim: P.
        ngroups: G.
        norm_before_gate: not used: the norm is not part of the call.
    """
    assert activation == "silu"
    heads = A.numel()
    size = headdim or D.shape[1]
    states = (zxbcdt.shape[2] - 2 * heads * size - heads) // 2
    z, convolved, dt = zxbcdt.split([heads * size, heads * size + 2 * states, heads], -1)
    convolved = causal_convolution(_wide(convolved), conv1d_weight, conv1d_bias, seq_idx)
    x, keys, queries = functional.silu(convolved).to(zxbcdt.dtype).split([heads * size, states, states], -1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, size)),
        dt,
        A,
        keys.unflatten(-1, (ngroups, -1)),
        queries.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, size)),
        dt_bias=dt_bias,
        dt_softplus=True,
        seq_idx=seq_idx,
    )
    return y.flatten(2)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Return the causal convolution of each channel, [B, S, C], and no state.

    Args:
        x: [B, S, C].
        weight: [C, W].
        bias: [C], or ``None``.
        activation: ``silu``, ``swish`` or ``None``.
        initial_state: must be ``None``.
        output_final_state: must be false.
        cu_seqlens: 0 and the end of each document, where B is 1.
    """
    assert initial_state is None
    assert not output_final_state
    assert activation in ("silu", "swish", None)
    y = causal_convolution(_wide(x), weight, bias, _numbered(cu_seqlens, x.shape[1]))
    return (functional.silu(y) if activation else y).to(x.dtype), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return a tensor with each vector along its last axis divided by the vector's L2 norm."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Return the outputs of the gated delta rule, [B, S, H, P], and no state.

    Args:
        q: [B, S, H, N].
        k: [B, S, H, N].
        v: [B, S, H, P].
        g: logarithm of the decay, [B, S, H].
        beta: [B, S, H].
        scale: factor on queries; ``None``: 1 / sqrt(N).
        initial_state: must be ``None``.
        output_final_state: must be false.
        use_qk_l2norm_in_kernel: must be false.
        cu_seqlens: 0 and the end of each document, where B is 1.
    """
    assert initial_state is None
    assert not output_final_state
    assert not use_qk_l2norm_in_kernel
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    queries, keys, values, decays, rates = (_wide(part) for part in (q * factor, k, v, g, beta))
    documents = _numbered(cu_seqlens, q.shape[1])
    return delta_rule_scan(queries, keys, values, decays, rates, documents).to(v.dtype), None


def stand_ins() -> dict[str, ModuleType]:
    """Return modules by name, in place of packages that have no kernels for a CPU."""
    modules: dict[str, dict[str, Any]] = {
        # The first versions that take documents: what Megatron asks for before it gives any.
        "mamba_ssm": {"__version__": "2.0.0"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "causal_conv1d": {"__version__": "1.4.0"},
        "fla": {},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    return {name: _module(name, contents) for name, contents in modules.items() if name not in sys.modules}


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, f"Stands in for {name} on a CPU.")
    module.__spec__ = ModuleSpec(name, None)  # asked for by who looks whether a package is installed
    module.__path__ = []
    vars(module).update(contents)
    return module


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _numbered(ends: Tensor | None, length: int) -> Tensor | None:
    """Return the number of each token's document, [1, S], of 0 and the documents' ends."""
    if ends is None:
        return None
    places = torch.arange(length, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, places, right=True).unsqueeze(0)


_WHY = "a CPU compiles nothing, and would hold the result of each operation of the gradient"


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that saves only its input and the scale of each row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = inputs.float() if inputs.dtype.itemsize < 4 else inputs
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(inputs, weight, scale)
        return (wide * scale).mul_(weight).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normal = inputs * scale  # in the wider type
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        weighted = grad * weight.to(normal.dtype)
        mean = (weighted * normal).mean(-1, keepdim=True)
        grad_inputs = weighted.sub_(normal.mul_(mean)).mul_(scale)
        return grad_inputs.to(inputs.dtype), grad_weight, None


class RMSNorm(torch.nn.RMSNorm):
    """Replaces `torch.nn.RMSNorm`, which on a CPU is not one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis.

        Args:
            x: [..., hidden].
        """
        assert self.eps is not None, "Megatron gives it"
        normalised: Tensor = _RMSNormFunction.apply(x, self.weight, self.eps)
        return normalised


def _swiglu_gradient(grad: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of SwiGLU's input, [..., 2 f], computed without temporary tensors.

    Args:
        grad: gradient of the output, [..., f].
        inputs: inputs of the forward pass, [..., 2 f].
    """
    gate, linear = inputs.chunk(2, -1)
    result = torch.empty_like(inputs)
    grad_gate, grad_linear = result.chunk(2, -1)
    torch.mul(grad, linear, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=grad_linear)
    grad_linear.mul_(grad)
    return result


@patched("megatron.core.fusions.fused_bias_swiglu:swiglu_back", why=_WHY)
def _of_swiglu(original: Callable[..., Tensor], g: Tensor, y: Tensor) -> Tensor:
    return _swiglu_gradient(g, y)


@patched("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_back", why=_WHY)
def _of_biased_swiglu(original: Callable[..., Tensor], g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return _swiglu_gradient(g, y + bias)


@patched("megatron.core.fusions.fused_bias_gelu:bias_gelu_back", why=_WHY)
def _of_biased_gelu(original: Callable[..., Tensor], g: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    inputs = bias + y
    return torch.ops.aten.gelu_backward.grad_input(g, inputs, approximate="tanh", grad_input=inputs)


FUSED_PATCHES = (
    _of_swiglu,
    _of_biased_swiglu,
    _of_biased_gelu,
)
