"""A GPU as the planner sees it: memory, links, and curves of what it achieves.

Nominal rates are for people. A planner that believes them gives the newest GPU too much: H100 to A100
is 3.17 : 1 by datasheet and 1.7 : 1 in attention with FlashAttention-2 on both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_hexi.errors import ClusterError
from megatron_hexi.plan.kernels import KERNEL_ALIASES


@dataclass(frozen=True)
class Curve:
    """Achieved rate against size.

    Between two sizes the rate is linear in the logarithm of the size; outside them it stays as at the
    nearer end.

    Args:
        sizes: ascending, at least one. Rows for a matrix product, tokens of the sequence for attention.
        rates: TFLOP/s at each size.
        source: who measured it, or how it was estimated.
        estimate: whether nobody measured it on this GPU with this kernel.
        given_from: the least size that the source gives; smaller ones follow from the saturating rule.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]
    source: str
    estimate: bool = False
    given_from: float = 1

    def rate(self, size: float) -> float:
        """Return TFLOP/s at a size."""
        above = bisect_right(self.sizes, size)
        if above == 0:
            return self.rates[0]
        if above == len(self.sizes):
            return self.rates[-1]
        low, high = self.sizes[above - 1], self.sizes[above]
        part = math.log(size / low) / math.log(high / low)
        return self.rates[above - 1] + part * (self.rates[above] - self.rates[above - 1])

    def best_up_to(self, size: float) -> float:
        """Return the most TFLOP/s at any size up to this one."""
        return max([self.rate(size), *self.rates[: bisect_right(self.sizes, size)]])

    def time(self, flops: float, size: float) -> float:
        """Return the seconds of a number of floating-point operations at a size."""
        return flops / (self.rate(size) * 1e12)

    @cached_property
    def points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Logarithms of the sizes, and FLOP/s at each."""
        return np.log(np.array(self.sizes)), np.array(self.rates) * 1e12

    def scaled(self, factor: float) -> Curve:
        """Return the curve with all rates multiplied by `factor`."""
        if factor == 1:
            return self  # with its points
        return replace(self, rates=tuple(rate * factor for rate in self.rates))


@dataclass(frozen=True)
class Passes:
    """Curves of the two directions. The backward pass counts 2.5 times the forward pass's FLOPs."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class Attention:
    """Achieved rates of one attention kernel with heads of 128, in bf16 (fp16 where there is no bf16).

    Args:
        kernel: its name, as in ``--hexi-kernel``.
        causal: a query sees keys up to its own position; counted as half the FLOPs of `full`.
        full: every query sees every key: 4 x queries x keys x head dim x heads FLOPs forward.
    """

    kernel: str
    causal: Passes
    full: Passes

    def map(self, change: Callable[[Curve], Curve]) -> Attention:
        """Return the kernel's rates with a function applied to each of the four curves."""
        causal, full = (Passes(change(p.forward), change(p.backward)) for p in (self.causal, self.full))
        return Attention(self.kernel, causal, full)

    @property
    def curves(self) -> dict[str, Curve]:
        """The four curves by name."""
        return {
            "causal forward": self.causal.forward,
            "causal backward": self.causal.backward,
            "full forward": self.full.forward,
            "full backward": self.full.backward,
        }


@dataclass(frozen=True)
class Nominal:
    """Dense rates by datasheet, TFLOP/s, by precision; ``None`` where the GPU lacks it."""

    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    tf32: float | None = None
    fp32: float | None = None


@dataclass(frozen=True)
class Link:
    """The link of a GPU to the others of its node.

    Args:
        kind: NVLink4, PCIe5, …
        bandwidth_gb_s: achieved, 10^9 bytes/s a direction; each GPU has this much out and in.
        latency_us: latency of one message, µs.
        source: who measured it, or how it was estimated.
        estimate: whether nobody measured it.
        nominal_gb_s: bandwidth by datasheet, a direction.
    """

    kind: str
    bandwidth_gb_s: float
    latency_us: float
    source: str
    estimate: bool = False
    nominal_gb_s: float | None = None


@dataclass(frozen=True)
class Host:
    """The memory of a GPU's node, as the GPU reaches it.

    Args:
        usable_gib: memory that a job may pin for each GPU of the node, GiB.
        bandwidth_gb_s: bandwidth of copies between the GPU and pinned memory, 10^9 bytes/s a direction, while
            all GPUs of the node copy.
        memory_gb_s: bandwidth of that memory for the processes of each GPU, 10^9 bytes/s, while all use it.
        source: who measured it, or how it was estimated.
        estimate: whether nobody measured it.
    """

    usable_gib: float
    bandwidth_gb_s: float
    memory_gb_s: float
    source: str
    estimate: bool = False


@dataclass(frozen=True)
class Device:
    """A model of GPU.

    Args:
        name: name in cluster files.
        memory_gb: memory as its vendor sells it.
        usable_gib: memory that a process finds free on it, GiB.
        memory_gb_s: bandwidth of its memory by datasheet, 10^9 bytes/s.
        capability: CUDA compute capability.
        nominal: rates by datasheet.
        link: link to the other GPUs of its node.
        matmul: achieved by matrix products, against rows, in bf16 (fp16 where there is no bf16).
        attentions: kernels with curves, those of the cluster file before the catalogue's, and the fastest
            (causal, forward, 16k tokens) of each first.
        source: the datasheet.
        note: remark for users.
        matmul_fp8: achieved by matrix products in fp8; ``None`` where nobody measured it.
        layer_share: share of both rates that a training layer's matrices reach; 1 where measured as a layer
            runs them.
        host: its node's memory; ``None``: not known, so that nothing can be planned to lie there.
    """

    name: str
    memory_gb: float
    usable_gib: float
    memory_gb_s: float
    capability: tuple[int, int]
    nominal: Nominal
    link: Link
    matmul: Curve
    attentions: tuple[Attention, ...]
    source: str
    note: str = ""
    matmul_fp8: Curve | None = None
    layer_share: float = 1.0
    host: Host | None = None

    @property
    def layer_matmul(self) -> Curve:
        """The rates of a training layer's matrix products: `matmul` times `layer_share`."""
        return self.matmul.scaled(self.layer_share)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the attention kernels with curves, the default first."""
        return tuple(attention.kernel for attention in self.attentions)

    @property
    def curves(self) -> dict[str, Curve]:
        """All curves by name."""
        in_fp8 = {} if self.matmul_fp8 is None else {"matmul fp8": self.matmul_fp8}
        return (
            {"matmul": self.matmul}
            | in_fp8
            | {
                f"{attention.kernel} {name}": curve
                for attention in self.attentions
                for name, curve in attention.curves.items()
            }
        )

    def attention(self, kernel: str | None = None) -> Attention:
        """Return the curves of an attention kernel, by default those of the first.

        Raises:
            ClusterError: no curves of that kernel are known for this GPU.
        """
        if kernel is None:
            return self.attentions[0]
        name = KERNEL_ALIASES.get(kernel, kernel)
        for attention in self.attentions:
            if attention.kernel == name:
                return attention
        raise ClusterError(
            f"{self.name}: no curves for kernel {kernel}; use {' or '.join(self.kernels)}, "
            f"or give measured ones under devices: in the cluster file"
        )

    def at_speed(self, factor: float) -> Device:
        """Return this GPU with all curves multiplied by `factor`: a throttled GPU, or a what-if."""
        if factor == 1:
            return self
        return replace(
            self,
            matmul=self.matmul.scaled(factor),
            matmul_fp8=None if self.matmul_fp8 is None else self.matmul_fp8.scaled(factor),
            attentions=tuple(item.map(lambda curve: curve.scaled(factor)) for item in self.attentions),
        )

    def with_memory(self, memory_gb: float) -> Device:
        """Return this GPU with other memory, GB; the usable part keeps its share."""
        return replace(self, memory_gb=memory_gb, usable_gib=self.usable_gib * memory_gb / self.memory_gb)
