"""The type names of tensors: Megatron's optimizer tells master weights apart by "torch.cuda.FloatTensor"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hexi.patching import Patch
from megatron_hexi.platform.cpu_callers import called_from_megatron


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        if isinstance(answer, str) and called_from_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


TENSOR_TYPE_PATCHES = (
    Patch(
        target="torch:Tensor.type",
        why="Megatron's optimizer and gradient clipping accept torch.cuda.*Tensor only",
        build=_type,
        package="torch",
        versions=">=2.6",
    ),
)
