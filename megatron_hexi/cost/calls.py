"""Seconds that the host takes to call the operations of a layer, which short kernels wait for.

The host runs ahead of the GPU as long as its calls take less than the kernels, so a pass takes the longer of
the two. Routed experts are a pass of their own: the host waits for the numbers of rows before it calls what
follows. Counted are operations that start a kernel, of Megatron-core 0.19's layer with experts and without,
norms, rotary embedding and activation fused as Transformer Engine has them (unfused, a layer has 62 forward
and 78 backward, and 193 and 271 with 16 experts one after the other).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints


class Calls(NamedTuple):
    """Numbers of operations that are called from Python, forward and backward."""

    forward: Floats | float
    backward: Floats | float


#: Of a layer without experts: norms, four linear layers, rotary embedding, attention, residuals, activation,
#: and copies between them.
LAYER_CALLS = Calls(30, 35)
#: Of the router, of sorting rows and of both all-to-alls.
_ROUTED = Calls(70, 55)
#: Of the products of one expert in Transformer Engine's grouped layer, two forward and four backward, each a
#: launch from C++; and in fp8 of casts, and of scales laid out for each factor.
_EXPERT, _EXPERT_FP8 = Calls(2, 4), Calls(8, 14)
#: Of adding one expert's bias: two calls from Python, which are six launches, and four launches backward.
_BIAS = Calls(6, 4)
#: Of a call from Python, what a launch from C++ takes: 5 of 15 us.
_LAUNCH = 1 / 3


def expert_calls(count: Ints, *, in_fp8: bool, biased: bool = False) -> Calls:
    """Return the kernel launches of each pass of routed experts, for units that hold `count` experts, [U]."""
    each = _EXPERT_FP8 if in_fp8 else _EXPERT
    forward, backward = (own + more * biased for own, more in zip(each, _BIAS, strict=True))
    launches: Floats = _LAUNCH * np.asarray(count, dtype=float)
    return Calls(_ROUTED.forward + launches * forward, _ROUTED.backward + launches * backward)
