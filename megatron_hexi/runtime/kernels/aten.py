"""torch's own attention kernels: flash attention for CUDA and for the CPU, and cuDNN's.

cuDNN's operator is called without torch's dispatcher, which refuses tensors that cuDNN does not support. The
dispatcher's rules are repeated here, with known errors of cuDNN releases: `can_use_cudnn_attention` in
https://github.com/pytorch/pytorch/blob/001f694/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_hexi.plan.terms import WIDEST_HEADS
from megatron_hexi.runtime.kernels.base import (
    BlockKind,
    DenseKernel,
    KernelOnOffer,
    Mode,
    by_heads,
    by_rows,
    is_deterministic,
)

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_HALF_TYPES = (torch.bfloat16, torch.float16)


class AtenFlashKernel(KernelOnOffer):
    """`aten::_flash_attention_forward`: bf16 and fp16 on Ampere and newer, GQA natively.

    The operator takes [B, tokens, heads, D], which is the layout of our all-to-all for a batch of one
    sequence. Its backward pass is deterministic if `torch.use_deterministic_algorithms` asks for it.
    """

    name = "aten-flash"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {device.type}"
        if dtype not in _HALF_TYPES:
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"it takes head sizes up to 256 that 8 divides, not {head_dim}"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return "it needs compute capability 8.0"
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120, beside cuDNN's (`cudnn.py`).
        if 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
            return f"it has no backward for heads of {head_dim} on compute capability {capability}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        tensors = (by_rows(tensor, mode) for tensor in (query, key, value))
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tensors, *_lengths(query, key, mode), 0.0, mode.causal, False, scale=mode.scale
        )
        # Of several sequences the log-sum-exp is [H, Q].
        return by_heads(output, mode), lse.view(query.shape[:3])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the two generator states are not read; any tensors of their type will do.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        tensors = (by_rows(tensor, mode) for tensor in (grad, query, key, value, output))
        grads = torch.ops.aten._flash_attention_backward(
            *tensors,
            lse if mode.sequences is None else lse[0],
            *_lengths(query, key, mode),
            *(0.0, mode.causal, state, unused),
            scale=mode.scale,
        )
        grad_query, grad_key, grad_value = (by_heads(gradient, mode) for gradient in grads)
        return grad_query, grad_key, grad_value


def _lengths(query: Tensor, key: Tensor, mode: Mode) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the ends of sequences in queries and keys (``None``: one sequence), and the largest lengths."""
    if mode.sequences is None:
        return None, None, query.shape[2], key.shape[2]
    ends = mode.sequences.query_ends, mode.sequences.key_ends
    return *ends, max(mode.sequences.queries), max(mode.sequences.keys)


class AtenCpuKernel(DenseKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: fp64, fp32, bf16 and fp16, GQA natively.

    The operator crashes (SIGFPE) on an empty query or key, so it is never given one.
    """

    name = "aten-cpu"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {device.type}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {dtype}"
        return None

    def dense(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        return _FORWARD(query, key, value, 0.0, mode.causal, scale=mode.scale)

    def dense_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _BACKWARD(grad, query, key, value, output, lse, 0.0, mode.causal, scale=mode.scale)


#: Largest batch size and largest number of heads (max_cudnn_dim_size in the cited file).
_MOST = 65535
#: First release that does not read beyond the last query if the number of queries is no multiple of 128
#: (https://github.com/pytorch/pytorch/issues/169849).
_ANY_QUERIES = 91501
#: First release without NaN in the gradient of queries on Hopper if the last tile of keys is half full and no
#: causal mask hides it (https://github.com/pytorch/pytorch/issues/196678).
_HALF_TILES = 92600
#: Placeholder for cuDNN's folder in a remedy, if torch's cuDNN is not among the installed packages.
UNKNOWN_FOLDER = "FOLDER_OF_TORCHS_CUDNN"


class CudnnKernel(KernelOnOffer):
    """`aten::_scaled_dot_product_cudnn_attention`: bf16 and fp16, torch's fastest kernel on Hopper."""

    name = "cudnn"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim % 8 or head_dim > WIDEST_HEADS["cudnn"]:
            return f"it takes head sizes up to {WIDEST_HEADS['cudnn']} that 8 divides, not {head_dim}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        if not torch.backends.cudnn.is_available():
            return "torch was built without cuDNN"
        if cudnn_version() is None:
            return (
                "another cuDNN than torch's was loaded, as Transformer Engine does with the system's; "
                f"export LD_LIBRARY_PATH={torchs_cudnn() or UNKNOWN_FOLDER}:$LD_LIBRARY_PATH"
            )
        if is_deterministic():
            return "its backward is not deterministic"
        return None

    def takes(self, block: BlockKind) -> bool:
        # It builds an execution plan for each shape, and every sequence of documents has other shapes.
        if block.sequences is not None:
            return False
        batch, heads, queries, _ = block.query
        keys = block.key[2]
        if keys == 1 or max(batch, heads) > _MOST:
            return False
        # NaN in the gradients of keys and values, as of 9.26 still:
        # https://github.com/NVIDIA/cudnn-frontend/issues/1071 and /1072.
        if queries == 1:
            return False
        version = cudnn_version() or 0
        if queries % 128 and version < _ANY_QUERIES:
            return False
        if block.causal or keys % 128 != 64 or version >= _HALF_TILES:
            return True
        return torch.cuda.get_device_capability(block.device)[0] != 9

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, mode.causal, False, scale=mode.scale
        )
        return output, log_sum_exp.view(query.shape[:3])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout seed and offset are not read.
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, output, lse[..., None]),
            *(unused, unused, None, None, None, query.shape[2], key.shape[2], 0.0, mode.causal),
            scale=mode.scale,
        )


def cudnn_version() -> int | None:
    """Return the version of cuDNN, such as 91900; ``None`` if torch cannot use the loaded cuDNN."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:  # an older one
        return None


def torchs_cudnn() -> str:
    """Return the folder of the cuDNN libraries installed with torch; empty if there is none."""
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return f"{places[0]}/lib" if places else ""
