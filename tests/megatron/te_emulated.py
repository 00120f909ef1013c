"""Transformer Engine's Python over an emulation of its CUDA extension, so that its layers train on a CPU.

Megatron's default layers are Transformer Engine's. Its wheel holds Python alone; what computes is in a C++
extension that needs CUDA. `install` loads the Python with the few functions of the extension that layers
call written in torch: products, grouped products, norms, and casts to fp8 (`te_fp8`). Any other function of
the extension raises NotImplementedError with its name. Attention is not emulated: under a plan it is ours.

The wheel is unpacked beside the environment's packages (`scripts/bootstrap.sh`), not among them: with the
Python alone, ``import transformer_engine`` fails in a way that Megatron does not expect.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Never
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.megatron import te_fp8

#: Where `scripts/bootstrap.sh` unpacks the wheel.
WHEEL = Path(sys.prefix) / "transformer-engine"

_EXTENSION = "transformer_engine_torch"
#: Enumerations whose members the Python reads at import, in the extension's order.
_ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
    "FP8FwdTensors": " ".join(f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": " ".join(f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")),
}
#: Imported by features that layers in fp32 and bf16 do not use: export to ONNX, delta nets.
_UNUSED_PACKAGES = ("onnx", "onnxscript", "einops")


def is_available() -> bool:
    """Whether the wheel is unpacked."""
    return (WHEEL / "transformer_engine").is_dir()


def install() -> None:
    """Import Transformer Engine with its extension emulated. Call it before Megatron is imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else importing loads the CUDA library
    sys.path.append(str(WHEEL))
    for name in _UNUSED_PACKAGES:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _module(MagicMock(name=name), name)
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = _load_extension
    spec.loader.exec_module(package)
    te_fp8.install(sys.modules[_EXTENSION])
    _compute_in_torch()


class _Missing(type):
    """The type of what the extension has and the emulation lacks: it may be named, also its members."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError(f"{cls.__name__} is not emulated")

    def __int__(cls) -> int:
        return -1  # numbers of attention formats, which are read at import and not used


class _Extension(ModuleType):
    """The extension: what is set, and functions and classes that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{_EXTENSION}.{name}", (), {})


def _module(module: Any, name: str) -> Any:
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    return module


def _load_extension(framework: str) -> None:
    if framework != "torch":
        raise ImportError(f"Transformer Engine for {framework} is not emulated")
    extension = _module(_Extension(_EXTENSION), _EXTENSION)
    for name, members in _ENUMERATIONS.items():
        setattr(extension, name, enum.IntEnum(name, members.split(), start=0))
    extension.get_cudnn_version = lambda: 91900
    extension.get_cublasLt_version = lambda: 130000
    extension.rmsnorm_fwd, extension.rmsnorm_bwd = rmsnorm, rmsnorm_gradient
    extension.multi_tensor_sgd = sgd_step
    extension.layernorm_fwd, extension.layernorm_bwd = layernorm, layernorm_gradient
    sys.modules[_EXTENSION] = extension


def product(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    grad: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Transformer Engine's `general_gemm`, in column-major terms: ``TN`` gives B Aᵀ, ``NN`` B A, ``NT`` Bᵀ A.

    Args:
        A: [out, in], or the layer's input [rows, in] for ``NT``.
        B: [rows, in], or the output's gradient [rows, out].
        out_dtype: of the result.
        accumulate: add to `out`.
        layout: which of the three products.
        out: written in place of a new tensor.
        bias: added; with `grad`, its gradient is returned instead.
        grad: whether this is a backward product.
        unused: settings of fp8 and of overlapped communication.

    Returns:
        The product, the bias's gradient, and two values that only fp8 and overlap use.
    """
    if te_fp8.is_quantized(A) or te_fp8.is_quantized(B):
        te_fp8.check_product(layout, A, B)
        A, B = te_fp8.operand(A, by_rows=layout[0] == "T"), te_fp8.operand(B, by_rows=layout[1] == "N")
    if layout == "TN":
        result = B @ A.t()
    elif layout == "NN":
        result = B @ A
    else:
        result = B.flatten(0, -2).t() @ A.flatten(0, -2)
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = B.flatten(0, -2).sum(0)
        else:
            result = result + bias
    result = result if out_dtype is None else result.to(out_dtype)
    if out is not None:
        result = result.view(out.shape)
        result = out.add_(result) if accumulate else out.copy_(result)
    return result, bias_gradient, None, None


def grouped_product(
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    out: list[Tensor],
    quantization_params: Sequence[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    grad: bool = False,
    single_output: bool = False,
    **unused: Any,
) -> tuple[Any, Any, None]:
    """Transformer Engine's `general_grouped_gemm`: one product for each expert.

    Args:
        A: as of `product`, one for each expert.
        B: likewise.
        out: of each expert, or one tensor for all with `single_output`.
        quantization_params: unused.
        out_dtype: unused: `out` has it.
        layout: as of `product`.
        m_splits: rows of each expert.
        accumulate: add to `out`.
        bias: of each expert.
        use_bias: whether there are any.
        grad: whether these are backward products.
        single_output: whether the experts' rows stand in one tensor, one expert after another.
        unused: settings of fp8.
    """
    assert m_splits is not None or not single_output
    outputs = list(out[0].split(list(m_splits or ()))) if single_output else out
    gradients = []
    for number, (left, right, result) in enumerate(zip(A, B, outputs, strict=True)):
        its_bias = bias[number] if use_bias and bias is not None else None
        _, gradient, *_ = product(
            left, right, accumulate=accumulate, layout=layout, out=result, bias=its_bias, grad=grad
        )
        gradients.append(gradient)
    return (out[0] if single_output else out), (gradients if grad else bias), None


def rmsnorm(
    inputs: Tensor, weight: Tensor, eps: float, out: Tensor | None, *settings: Any
) -> tuple[Tensor, None, Tensor]:
    """The extension's `rmsnorm_fwd`; the last of `settings` adds 1 to the weight.

    Args:
        inputs: [rows, hidden].
        weight: [hidden].
        eps: added to the mean square.
        out: written in place of a new tensor.
        settings: quantizer, type, multiprocessors to leave free, and whether the weight is stored less 1.

    Returns:
        Output, nothing, and 1 / rms of each row.
    """
    wide = inputs.float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    result = (wide * scale[:, None] * (weight.float() + settings[-1])).to(inputs.dtype)
    return te_fp8.norm_output(result, settings[0], out), None, scale


def rmsnorm_gradient(
    grad: Tensor, inputs: Tensor, scale: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    """The extension's `rmsnorm_bwd`: gradients of the input and of the weight.

    Args:
        grad: of the output.
        inputs: [rows, hidden].
        scale: 1 / rms of each row.
        weight: [hidden].
        settings: as of `rmsnorm`.
    """
    grad = grad.reshape(inputs.shape).float()
    normal = inputs.float() * scale[:, None]
    weighted = grad * (weight.float() + settings[-1])
    mean = (weighted * normal).mean(-1, keepdim=True)
    return (scale[:, None] * (weighted - normal * mean)).to(inputs.dtype), (grad * normal).sum(0).to(
        weight.dtype
    )


def sgd_step(chunk_size: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], *settings: Any) -> None:
    """The extension's `multi_tensor_sgd`: a step of SGD, in place.

    Args:
        chunk_size: unused.
        overflow: unused: no gradient is infinite.
        tensors: gradients, weights and momentums.
        settings: weight decay, momentum, dampening, learning rate, whether Nesterov's, whether the momentums
            are new, whether weights decay behind the momentum, and the factor of the gradients.
    """
    decay, momentum, dampening, rate, nesterov, is_new, decays_behind, factor = settings
    assert not nesterov
    assert not decays_behind
    for gradient, weight, buffer in zip(*tensors, strict=True):
        change = factor * gradient + decay * weight
        if momentum:
            change = buffer.mul_(0 if is_new else momentum).add_(change, alpha=1 if is_new else 1 - dampening)
        weight.sub_(change, alpha=rate)


def layernorm(
    inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The extension's `layernorm_fwd`, in the terms of `rmsnorm`, with the mean of each row for nothing."""
    wide = inputs.float()
    mean = wide.mean(-1)
    centred = wide - mean[:, None]
    result, _, scale = rmsnorm(centred, weight, eps, None, None, *settings[1:])
    result = (result + bias).to(inputs.dtype)
    return te_fp8.norm_output(result, settings[0], out), mean, scale


def layernorm_gradient(
    grad: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The extension's `layernorm_bwd`: gradients of the input, of the weight and of the bias."""
    centred = inputs.float() - mean[:, None]
    of_centred, of_weight = rmsnorm_gradient(grad, centred, scale, weight, *settings)
    of_input = of_centred - of_centred.mean(-1, keepdim=True)
    return of_input.to(inputs.dtype), of_weight, grad.reshape(inputs.shape).sum(0).to(weight.dtype)


def _compute_in_torch() -> None:
    """Put the emulation where Transformer Engine's modules have imported the originals to."""
    from transformer_engine.pytorch.module import base

    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine."):
            for function, emulation in (
                ("general_gemm", product),
                ("general_grouped_gemm", grouped_product),
                ("get_cublas_workspace", lambda *_: torch.empty(1, dtype=torch.uint8)),
            ):
                if hasattr(module, function):
                    setattr(module, function, emulation)
    # Its layers refuse tensors of a CPU, in one line of a longer method.
    method = base.TransformerEngineBaseModule.prepare_forward
    source = textwrap.dedent(inspect.getsource(method))
    assert "if not inp.is_cuda:" in source
    made: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace("not inp.is_cuda", "False"), vars(base), made
    )
    base.TransformerEngineBaseModule.prepare_forward = made["prepare_forward"]


def use_torch_in_megatron() -> None:
    """Let Megatron take from torch what it takes from Transformer Engine outside of layers.

    That is the optimizer, norms and scaling of gradients, and rotary embeddings. Call it once Megatron is
    imported.
    """
    from megatron.core import optimizer
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base
    from megatron.core.utils import (
        local_multi_tensor_applier,
        local_multi_tensor_l2_norm,
        local_multi_tensor_scale,
    )
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    distrib_optimizer.HAVE_APEX_OR_TE = False
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_tensor_impl = local_multi_tensor_l2_norm, None
    for module in (clip_grads, base):
        module.multi_tensor_applier = local_multi_tensor_applier
        module.multi_tensor_scale_impl = local_multi_tensor_scale

    def rotate(tensor: Tensor, frequencies: Tensor, interleaved: bool = False) -> Tensor:
        return apply_rotary_pos_emb(
            tensor, frequencies, tensor_format="sbhd", interleaved=interleaved, fused=False
        )

    rope_utils.fused_apply_rotary_pos_emb = rotate
    # Grouped experts ask for the least that their kernels need.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
