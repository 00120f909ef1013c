"""Pacing of a training run: every operation that the device's curves know takes the time they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hexi.lab.testbed.in_rank.charge import Charger
from megatron_hexi.lab.testbed.in_rank.clock import PacedClock
from megatron_hexi.lab.testbed.throttle import Throttle, speed_at


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
