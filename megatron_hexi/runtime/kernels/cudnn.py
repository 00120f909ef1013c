"""cuDNN's attention kernel, called through torch.

The operator is called without torch's dispatcher, which refuses tensors that cuDNN does not support. The
dispatcher's rules are repeated here, with known errors of cuDNN releases: `can_use_cudnn_attention` in
https://github.com/pytorch/pytorch/blob/001f694/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_hexi.plan.kernels import WIDEST_HEADS
from megatron_hexi.runtime.kernels.base import BlockKind, KernelOnOffer, Mode, is_deterministic

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
