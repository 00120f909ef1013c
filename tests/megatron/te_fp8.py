"""Tensors in fp8 as Transformer Engine's CUDA extension makes and multiplies them, in torch on the CPU.

The classes of tensors and quantizers are Transformer Engine's own Python. Written here is what its extension
does: the scaling rules of each recipe, the cast, and what its products require of their operands. As on
Hopper, both operands of a product must be contiguous along the sum, so per-tensor and blockwise tensors carry
a transposed copy; MXFP8 has a copy scaled along columns. Products are of the values that the casts left.

Shape letters: M rows (tokens, or outputs of a weight), K columns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Largest number of each format, by its name in Transformer Engine's enumeration of types.
_LARGEST = {"kFloat8E4M3": (torch.float8_e4m3fn, 448.0), "kFloat8E5M2": (torch.float8_e5m2, 57344.0)}
_TILE, _MX_BLOCK = 128, 32


class AlignmentError(AssertionError):
    """A size that Transformer Engine's extension refuses."""


def install(extension: Any) -> None:
    """Put the functions of this module into the emulated extension."""
    from transformer_engine.pytorch import distributed, quantization

    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = (True, "")
    quantization._FP8_BLOCK_SCALING_SUPPORT = (True, "")
    dist._coalescing_manager = functools.partial(_manager_of_caller, dist._coalescing_manager)
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    extension.quantize, extension.split_quantize = quantize, split_quantize
    extension.dequantize = lambda tensor, dtype: operand(tensor, by_rows=None)
    extension.bgrad_quantize = lambda grad, quantizer: (grad.sum(0), quantize(grad, quantizer))
    extension.create_empty_quantized_tensor = empty
    extension.fp8_transpose = lambda data, dtype, out=None: data.flatten(0, -2).t().contiguous()
    extension.swap_first_dims = swap_first_dims
    extension.fused_amax_and_scale_update_after_reduction = update_scales
    extension.fused_multi_row_padding = extension.fused_multi_row_unpadding = copy_rows


def _manager_of_caller(original: Any, *settings: Any, **more: Any) -> Any:
    """torch's `_coalescing_manager`; for Transformer Engine, whose all-gathers gloo cannot coalesce, none.

    Megatron's collectives in it are asynchronous, and wait by what torch's own yields.
    """
    caller = sys._getframe(1).f_globals["__name__"]
    return _one_by_one() if caller.startswith("transformer_engine.") else original(*settings, **more)


@contextlib.contextmanager
def _one_by_one() -> Iterator[Any]:
    """Let collectives that are not asynchronous be done one after another."""
    yield SimpleNamespace(wait=lambda: None)


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *unused: Any) -> Any:
    """The extension's `create_empty_quantized_tensor`: a tensor of a quantizer's kind without values."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    # Delayed scaling's tensors are those of current scaling, which can say what they consist of.
    describing = quantizer
    if isinstance(quantizer, Float8Quantizer):
        describing = Float8CurrentScalingQuantizer(
            quantizer.dtype, "cpu", rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage
        )
        describing.internal = quantizer.internal
    made = describing.storage_metadata(dtype)
    inner: dict[str, torch.Tensor | None] = {
        name.lstrip("_"): torch.zeros(size, dtype=kind)
        for name, (size, kind) in describing.inner_tensor_specs(tuple(shape)).items()
    }
    names = {"data": "data", "transpose": "data_transpose", "scale_inv": "fp8_scale_inv"}
    if isinstance(describing, Float8CurrentScalingQuantizer):
        inner = {"data": None, **{names[name]: value for name, value in inner.items()}}
    else:
        sides = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        inner = {name: inner.get(name) for name in sides}
    settings = made["nontensor_kwargs"] | {"quantizer": quantizer}
    if quantizer.internal:
        return made["cls"](**inner, **settings)
    return made["cls"](
        shape=tuple(shape), dtype=settings.pop("fake_dtype"), device=torch.device("cpu"), **inner, **settings
    )


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, noop: Tensor | None = None) -> Any:
    """The extension's `quantize`: cast a tensor as its quantizer says.

    Args:
        tensor: [..., K].
        out: written in place of a new tensor.
        noop: unused: a flag by which CUDA graphs skip the cast.
    """
    values = tensor.detach()
    new = empty(quantizer, values.shape, values.dtype)
    if out is None:
        out = new
    else:  # copies that the quantizer does not make are dropped (quantizer.cpp, `convert_and_update_tensor`)
        for name in ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"):
            if hasattr(out, name):
                setattr(out, name, getattr(new, name))
        if hasattr(out, "_transpose"):
            out._transpose, out._transpose_invalid = None, True
    matrix = values.flatten(0, -2).float() if values.dim() > 1 else values.float()[None]
    kind = type(quantizer).__name__
    if kind == "MXFP8Quantizer":
        _fill_mx(matrix, quantizer, out)
    elif kind == "Float8BlockQuantizer":
        _fill_tiles(matrix, quantizer, out)
    else:
        scale = (
            _delayed_scale(matrix, quantizer) if kind == "Float8Quantizer" else _scale_now(matrix, quantizer)
        )
        data = _cast(matrix * scale, quantizer)
        if out._data is not None:
            out._data = data.view(out._data.shape)
        if quantizer.columnwise_usage:
            out._transpose, out._transpose_invalid = data.t().contiguous(), False
        out._scale_inv = (1 / scale).reshape(1)
    return out


def split_quantize(
    tensor: Tensor, rows: Sequence[int], quantizers: Sequence[Any], **unused: Any
) -> list[Any]:
    """The extension's `split_quantize`: a tensor for each expert, whose rows follow each other."""
    return [quantize(part, its) for part, its in zip(tensor.split(list(rows)), quantizers, strict=True)]


def _fill_tiles(matrix: Tensor, quantizer: Any, out: Any) -> None:
    """Fill a blockwise tensor: tiles of 1 x 128 for activations and gradients, 128 x 128 for weights."""
    edge = _TILE if quantizer.block_scaling_dim == 2 else 1
    for side, turned in (("rowwise", matrix), ("columnwise", matrix.t())):
        if not getattr(quantizer, f"{side}_usage"):
            continue
        scale = _tile_scales(_block_maxima(turned, edge, _TILE), quantizer)
        data = _cast(turned * _spread(scale, edge, _TILE, turned.shape), quantizer)
        # Scales of tiles of one row stand with the rows last.
        inverse = 1 / (scale if edge > 1 else scale.t())
        stored = getattr(out, f"_{side}_scale_inv")
        stored.zero_()[: inverse.shape[0], : inverse.shape[1]] = inverse
        setattr(out, f"_{side}_data", data.contiguous().view(getattr(out, f"_{side}_data").shape))


def _fill_mx(matrix: Tensor, quantizer: Any, out: Any) -> None:
    """Fill an MXFP8 tensor: blocks of 32 along rows, and of 32 along columns, with powers of two."""
    if any(size % _MX_BLOCK for size in matrix.shape):
        raise AlignmentError(
            f"MXFP8 requires tensor dims that are divisible by {_MX_BLOCK} (got shape={matrix.shape})"
        )
    largest = _LARGEST[quantizer.dtype.name][1]
    for side, block in (("rowwise", (1, _MX_BLOCK)), ("columnwise", (_MX_BLOCK, 1))):
        if not getattr(quantizer, f"{side}_usage"):
            continue
        fraction, exponent = torch.frexp(_block_maxima(matrix, *block) / largest)
        biased = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254)  # rounded up
        scale = torch.exp2(127.0 - biased.where(fraction > 0, torch.zeros_like(biased)))
        stored = getattr(out, f"_{side}_scale_inv")
        stored.zero_()[: biased.shape[0], : biased.shape[1]] = (127 - scale.log2()).to(torch.uint8)
        data = _cast(matrix * _spread(scale, *block, matrix.shape), quantizer)
        setattr(out, f"_{side}_data", data.view(getattr(out, f"_{side}_data").shape))


def _block_maxima(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest absolute value of each block of a matrix, whose last blocks may be smaller."""
    height, width = (-size % block for size, block in zip(matrix.shape, (rows, columns), strict=True))
    padded = torch.nn.functional.pad(matrix.abs(), (0, width, 0, height))
    return padded.view(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))


def _spread(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """Return the scale of each element of a matrix."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _cast(scaled: Tensor, quantizer: Any) -> Tensor:
    kind, largest = _LARGEST[quantizer.dtype.name]
    return scaled.clamp(-largest, largest).to(kind).view(torch.uint8)


def _tile_scales(maxima: Tensor, quantizer: Any) -> Tensor:
    """Return the scale of each of some maxima: a format's largest number over it, 1 where it is 0."""
    maxima = maxima.clamp(min=quantizer.amax_epsilon)
    scale = (_LARGEST[quantizer.dtype.name][1] / maxima).where(maxima > 0, torch.ones_like(maxima))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return torch.exp2(torch.frexp(scale).exponent - 1.0) if quantizer.force_pow_2_scales else scale


def _scale_now(matrix: Tensor, quantizer: Any) -> Tensor:
    """Return the scale of a tensor by the tensor itself, and by those of the ranks that gather it."""
    largest = matrix.abs().amax() if matrix.numel() else matrix.new_zeros(())
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
    return _tile_scales(largest, quantizer)


def _delayed_scale(matrix: Tensor, quantizer: Any) -> Tensor:
    """Return the quantizer's scale; it keeps the largest value seen since the last update."""
    if matrix.numel():
        quantizer.amax.copy_(torch.maximum(quantizer.amax, matrix.abs().amax().reshape(1)))
    return quantizer.scale


def update_scales(
    maxima: Tensor,
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    kind: Any,
    margin: int,
) -> None:
    """The extension's `fused_amax_and_scale_update_after_reduction`: scales by past maxima."""
    largest = _LARGEST[kind.name][1] / 2**margin
    for seen, history, scale in zip(
        maxima.split([s.numel() for s in scales]), histories, scales, strict=True
    ):
        latest = seen.where(seen != 0, history[0])
        rolled = torch.cat((torch.zeros_like(latest)[None], history[2:], latest[None]))[: len(history)]
        over = torch.maximum(history.amax(0), latest) if algorithm == "max" else latest
        counts = (over > 0) & over.isfinite() & (latest != 0)
        scale.copy_((largest / over).clamp(max=torch.finfo(torch.float32).max).where(counts, scale))
        history.copy_(rolled.where(latest != 0, history))


def copy_rows(rows: Tensor, out: Tensor, counts: Sequence[int], wanted: Sequence[int]) -> None:
    """The extension's `fused_multi_row_padding` and `fused_multi_row_unpadding`."""
    for part, place in zip(rows.split(list(counts)), out.split(list(wanted)), strict=True):
        kept = min(len(part), len(place))
        place.zero_()[:kept] = part[:kept]


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """The extension's `swap_first_dims`."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is one of fp8."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    return isinstance(tensor, QuantizedTensorStorage)


def operand(tensor: Any, *, by_rows: bool | None) -> Tensor:
    """Return the values of a tensor as a product reads them, [..., K] in fp32.

    Args:
        by_rows: whether the product sums along K; otherwise along the rows. ``None``: whatever copy there is.

    Raises:
        AlignmentError: a product cannot read the copy, or there is none.
    """
    if not is_quantized(tensor):
        return tensor
    kind = type(tensor).__name__
    if by_rows is None:
        by_rows = (tensor._data if kind.startswith("Float8Tensor") else tensor._rowwise_data) is not None
    side = "rowwise" if by_rows else "columnwise"
    if kind.startswith("Float8Tensor"):
        held = tensor._data if by_rows else tensor._transpose
        scale: Any = tensor._scale_inv
    else:
        held, scale = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    if held is None:
        raise AlignmentError(f"{kind}: the product needs its {side} data")
    values = held.view(_LARGEST[tensor._fp8_dtype.name][0]).float()
    # Transposed copies have columns first.
    matrix = values.flatten(0, -2) if by_rows or kind.startswith("MXFP8") else values.flatten(1)
    if kind.startswith("MXFP8"):
        block = (1, _MX_BLOCK) if by_rows else (_MX_BLOCK, 1)
        return (matrix * _spread(torch.exp2(scale.float() - 127), *block, matrix.shape)).view(values.shape)
    if not kind.startswith("Float8Tensor"):
        edge = _TILE if tensor._is_2D_scaled else 1
        scale = _spread(scale if edge > 1 else scale.t(), edge, _TILE, matrix.shape)
    matrix = matrix * scale
    return matrix.view(values.shape) if by_rows else matrix.t()


def check_product(layout: str, A: Any, B: Any) -> None:
    """Check the sizes of a product as the extension does (`CanonicalizeGemmInput` of cublaslt_gemm.cu).

    Args:
        layout: as of `te_emulated.product`.
        A: left operand, [.., K].
        B: right operand.
    """
    for tensor, sums_rows in ((A, layout[0] == "N"), (B, layout[1] == "T")):
        if not is_quantized(tensor):
            raise AlignmentError("a product of fp8 and another type")
        *leading, columns = tensor.size()
        rows = int(torch.tensor(leading).prod())
        inner, outer = (rows, columns) if sums_rows else (columns, rows)
        if inner % 16:
            raise AlignmentError(f"Leading dimension requirement for FP8 GEMM, {layout}: {rows} x {columns}")
        if type(tensor).__name__.startswith("Float8Blockwise") and outer % 8:
            raise AlignmentError(f"Outer dimension requirement, {layout}: {rows} x {columns}")


def norm_output(result: Tensor, quantizer: Any, out: Any) -> Any:
    """Return the output of a norm: cast where the norm was given a quantizer."""
    if quantizer is not None:
        return quantize(result, quantizer, out)
    return result if out is None else out.copy_(result)
