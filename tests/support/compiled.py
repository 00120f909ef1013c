"""A part of a compiled pass, carried out at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from megatron_hexi.plan.program import OwnBlock
from megatron_hexi.runtime.compiled import Recorder, Value


def carried_out(build: Callable[..., Iterable[Value | None]], *tensors: Tensor) -> list[Any]:
    """The tensors of the values that `build(recorder, *values)` returns, for these inputs of one type."""
    recorder = Recorder(tensors[0].dtype, tensors[0].device)
    values = recorder.inputs(*(tensor.shape for tensor in tensors))
    recorder.begin(OwnBlock(0, 2))
    return recorder.compile(*build(recorder, *values))(*tensors)
