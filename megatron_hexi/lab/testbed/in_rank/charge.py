"""Modelled time of an operation: FLOPs over the device's rate, counted as in cost/compute.py.

Charged are matrix products and attention. A product's size on the curve is its number of tokens: the rows of
its result, except where the left factor is a transpose. Then the product sums over tokens, as that of a
weight's gradient does (torch and Megatron both compute it as dY^T X), and their number is the summed size. So
forward, dX and dW of one linear layer run at one rate. On a constant curve the size does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_hexi.cluster import Curve, Device
from megatron_hexi.cost.compute import ATTENTION_BACKWARD, head_size_factor
from megatron_hexi.lab.testbed.in_rank.clock import PacedClock
from megatron_hexi.lab.testbed.quotas import KERNEL, fp32_factor
from megatron_hexi.lab.testbed.throttle import Throttle, speed_at

_aten = torch.ops.aten
#: Matrix products, and where their left factor stands among the arguments.
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_CHARGED = {*_PRODUCTS, _FORWARD, _BACKWARD}


class Charge(NamedTuple):
    """The modelled time of an operation.

    Args:
        kind: ``matmul`` or ``attention``.
        seconds: seconds of the operation on the device.
    """

    kind: str
    seconds: float


class Charger:
    """Computes the modelled time of operations from a device's curves.

    Args:
        device: the device; it has curves for `KERNEL`.
    """

    def __init__(self, device: Device) -> None:
        self._matmul = device.layer_matmul
        self._attention = device.attention(KERNEL)
        self._fp32_factor = fp32_factor(device)

    def knows(self, operation: Any) -> bool:
        """Return whether an overload of ``torch.ops`` is charged for."""
        return operation.overloadpacket in _CHARGED

    def charge(self, operation: Any, arguments: Sequence[Any], result: Any) -> Charge:
        """Return the charge of a call.

        Args:
            operation: an operation that the charge `knows`.
        """
        packet = operation.overloadpacket
        if packet is _FORWARD:
            return self._attention_charge(*arguments[:3], causal=_is_causal(arguments, 4), backward=False)
        if packet is _BACKWARD:
            return self._attention_charge(*arguments[1:4], causal=_is_causal(arguments, 7), backward=True)
        factor = arguments[_PRODUCTS[packet]]
        flops = flop_registry[packet](*arguments, out_val=result)
        return Charge("matmul", self._seconds(flops, self._matmul, _tokens(factor), factor.dtype))

    def _attention_charge(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, backward: bool
    ) -> Charge:
        """Return the time to charge for one attention call: query [B, H, Q, D], S keys.

        It counts 4 B H D Q S FLOPs, half if causal, at size sqrt(Q S).
        """
        passes = self._attention.causal if causal else self._attention.full
        curve = passes.backward if backward else passes.forward
        batch, heads, queries, head_dim = query.shape
        area = queries * key.shape[2]
        flops = 4 * batch * heads * head_dim * area / (2 if causal else 1)
        if backward:
            flops *= ATTENTION_BACKWARD
        seconds = self._seconds(flops, curve, area**0.5, query.dtype)
        return Charge("attention", seconds / head_size_factor(head_dim))

    def _seconds(self, flops: float, curve: Curve, size: float, dtype: torch.dtype) -> float:
        factor = self._fp32_factor if dtype in (torch.float32, torch.float64) else 1.0
        return flops / (_rate(curve, size) * factor)


@cache
def _rate(curve: Curve, size: float) -> float:
    """Return the rate of a curve, FLOP/s."""
    return curve.rate(max(1.0, size)) * 1e12


def _tokens(factor: Tensor) -> int:
    """Return the number of tokens in a product, from its left factor [..., rows, summed]."""
    rows, summed = factor.shape[-2:]
    transposed = factor.stride(-2) == 1 and factor.stride(-1) != 1
    return summed if transposed else rows


def _is_causal(arguments: Sequence[Any], place: int) -> bool:
    return len(arguments) > place and bool(arguments[place])


class Pacing(TorchDispatchMode):
    """Paces every operation of the thread that enters it, autograd's included."""

    def __init__(self, charger: Charger, clock: PacedClock, throttles: Sequence[Throttle] = ()) -> None:
        super().__init__()
        self._charger = charger
        self._clock = clock
        self._throttles = throttles

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and wait until its modelled time is over."""
        if func.namespace == "c10d":
            self._clock.message()
            return func(*args, **(kwargs or {}))
        if not self._charger.knows(func):
            return func(*args, **(kwargs or {}))
        begin = self._clock.begin()
        result = func(*args, **(kwargs or {}))
        charge = self._charger.charge(func, args, result)
        seconds = charge.seconds
        if self._throttles:
            seconds /= speed_at(self._throttles, self._clock.since_first(begin))
        self._clock.end(begin, charge.kind, seconds)
        return result
