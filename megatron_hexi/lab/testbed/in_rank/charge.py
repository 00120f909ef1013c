"""Modelled time of an operation: FLOPs over the device's rate, counted as in cost/compute.py.

Charged are matrix products and attention. A product's size on the curve is its number of tokens: the rows of
its result, except where the left factor is a transpose. Then the product sums over tokens, as that of a
weight's gradient does (torch and Megatron both compute it as dY^T X), and their number is the summed size. So
forward, dX and dW of one linear layer run at one rate. On a constant curve the size does not matter.

The device's clock makes an operation take its modelled time, whatever the machine needed for it. An operation
really runs; then its rank sleeps until the modelled time is over. Work between two such operations is not
modelled: the processor time that it takes makes the rank late, and the head-room of the next operations takes
that up. Waiting for another rank is no lateness: it takes no processor time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_hexi.cluster import Curve, Device
from megatron_hexi.cost.compute import ATTENTION_BACKWARD, head_size_factor
from megatron_hexi.lab.testbed.lab import Throttle, speed_at
from megatron_hexi.lab.testbed.quotas import KERNEL, fp32_factor

#: A rank that is later than this (after a checkpoint, say) gives up: it would run without a pace for long.
GIVE_UP_S = 1.0
_NANO = 1e-9


@dataclass
class PacedTimes:
    """Times of paced operations, in seconds unless said otherwise.

    Args:
        computing: time in which operations computed; for the rest of the modelled time the rank slept.
        excess: time by which operations computed longer than modelled, summed over those that did.
        lost: lateness that was not made up: beyond `GIVE_UP_S`, or left at the end.
        between: processor time and waiting for a core between operations, which are not modelled.
        exposed: part of `between` that delayed a message, so that other ranks may have waited.
    """

    operations: int = 0
    modelled: dict[str, float] = field(default_factory=dict)
    computing: float = 0.0
    excess: float = 0.0
    lost: float = 0.0
    between: float = 0.0
    exposed: float = 0.0
    wall: float = 0.0


class PacedClock:
    """The clock of the calling thread's rank."""

    def __init__(self) -> None:
        self.pace = PacedTimes()
        self.first = self._last = 0.0  # begin of the first operation, end of the last
        self._late = 0.0
        self._unsent = 0.0
        self._busy_at = 0.0
        self._schedule: int | None = None
        with suppress(OSError):  # a kernel without schedstats: waiting for a core is then not known
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def begin(self) -> float:
        """Begin an operation, and return the time now, for `end`."""
        if self.pace.operations:
            self._note_between()
        else:
            self.first = time.perf_counter()
        return time.perf_counter()

    def end(self, begin: float, kind: str, seconds: float) -> None:
        """End an operation: sleep until its modelled time is over."""
        pace, due, now = self.pace, begin + seconds - self._late, time.perf_counter()
        pace.operations += 1
        pace.modelled[kind] = pace.modelled.get(kind, 0.0) + seconds
        pace.computing += now - begin
        pace.excess += max(0.0, now - begin - seconds)
        if now < due:
            time.sleep(due - now)
            now = time.perf_counter()
        self._late = now - due
        if self._late > GIVE_UP_S:
            pace.lost += self._late
            self._late = 0.0
        self._last = now
        self._busy_at = self._busy()

    def message(self) -> None:
        """Note that a collective or a message is about to be posted."""
        if self.pace.operations:
            self._note_between()
            self.pace.exposed += max(0.0, min(self._late, self._unsent))
            self._unsent = 0.0

    def finish(self) -> PacedTimes:
        """Return the times of all paced operations."""
        self.pace.lost += max(0.0, self._late)
        self._late = 0.0
        self.pace.wall = self._last - self.first
        return self.pace

    def _note_between(self) -> None:
        busy = self._busy()
        spent = busy - self._busy_at
        self._busy_at = busy
        self.pace.between += spent
        self._late += spent
        self._unsent += spent

    def _busy(self) -> float:
        """Return the seconds that this thread has computed or has waited for a core."""
        if self._schedule is None:
            return time.thread_time()
        # Its first number is the time computed too, but only up to the scheduler's last look.
        waited = os.pread(self._schedule, 100, 0).split()[1]
        return time.thread_time() + int(waited) * _NANO


_aten = torch.ops.aten
#: Matrix products, and where their left factor stands among the arguments.
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_CHARGED = {*_PRODUCTS, _FORWARD, _BACKWARD}


class Charger:
    """Computes the modelled time of operations from a device's curves.

    Args:
        device: the device; it has curves for `KERNEL`.
    """

    def __init__(self, device: Device) -> None:
        self._matmul = device.layer_matmul
        self._attention = device.attention(KERNEL)
        self._fp32_factor = fp32_factor(device)

    def charge(self, operation: Any, arguments: Sequence[Any], result: Any) -> tuple[str, float]:
        """Return the kind of an operation that is charged for, and the modelled seconds of a call."""
        packet = operation.overloadpacket
        if packet is _FORWARD:
            return self._attention_charge(*arguments[:3], causal=_is_causal(arguments, 4), backward=False)
        if packet is _BACKWARD:
            return self._attention_charge(*arguments[1:4], causal=_is_causal(arguments, 7), backward=True)
        factor = arguments[_PRODUCTS[packet]]
        flops = flop_registry[packet](*arguments, out_val=result)
        return "matmul", self._seconds(flops, self._matmul, _tokens(factor), factor.dtype)

    def _attention_charge(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, backward: bool
    ) -> tuple[str, float]:
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
        return "attention", seconds / head_size_factor(head_dim)

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
        if func.overloadpacket not in _CHARGED:
            return func(*args, **(kwargs or {}))
        begin = self._clock.begin()
        result = func(*args, **(kwargs or {}))
        kind, seconds = self._charger.charge(func, args, result)
        if self._throttles:
            seconds /= speed_at(self._throttles, begin - self._clock.first)
        self._clock.end(begin, kind, seconds)
        return result
