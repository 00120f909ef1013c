"""Data classes of a GPU model: memory, links, and curves of achieved rates.

The datasheet's nominal rates are only shown to people. A planner that used them would give the newest GPU too
much work: the ratio of H100 to A100 is 3.17 by datasheet, but 1.7 in attention with FlashAttention-2 on both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hexi.cluster.schema import Latency, Memory, Rate, Text
from megatron_hexi.errors import ClusterError
from megatron_hexi.plan.terms import KERNEL_ALIASES, Fp8Recipe
from megatron_hexi.yaml_schema import Strict

#: Curves of matrix products in fp8.
FP8_CURVES = ("matmul_fp8", "matmul_blockwise", "matmul_mxfp8")


@dataclass(frozen=True)
class Curve:
    """A curve of the achieved rate of a matrix product or attention kernel against its size.

    Between two given sizes the rate is linear in the logarithm of the size; below the smallest and above the
    largest size it is constant.

    Args:
        sizes: at least one size, ascending: rows of a matrix product, or tokens of the sequence in attention.
        source: source of the measurement, or derivation of the estimate.
        estimate: whether the curve is an estimate, not measured on this GPU with this kernel.
        given_from: smallest size that the source gives; rates at smaller sizes follow from an assumed
            saturation.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]
    source: str
    estimate: bool = False
    given_from: float = 1

    def rate(self, size: float) -> float:
        """Return the rate at a size, TFLOP/s."""
        above = bisect_right(self.sizes, size)
        if above == 0:
            return self.rates[0]
        if above == len(self.sizes):
            return self.rates[-1]
        low, high = self.sizes[above - 1], self.sizes[above]
        part = math.log(size / low) / math.log(high / low)
        return self.rates[above - 1] + part * (self.rates[above] - self.rates[above - 1])

    def time(self, flops: float, size: float) -> float:
        """Return the seconds that `flops` floating-point operations take at a size."""
        return flops / (self.rate(size) * 1e12)

    @cached_property
    def points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Logarithms of the sizes, and the rate at each size in FLOP/s."""
        return np.log(np.array(self.sizes)), np.array(self.rates) * 1e12

    def scaled(self, factor: float) -> Curve:
        """Return the curve with all rates multiplied by `factor`."""
        if factor == 1:
            return self  # with its points
        return replace(self, rates=tuple(rate * factor for rate in self.rates))


@dataclass(frozen=True)
class PassCurves:
    """Curves of the forward and the backward pass, which counts 2.5 times the FLOPs of the forward pass."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class Attention:
    """Achieved rates of one attention kernel for heads of 128 in bf16 (fp16 on GPUs without bf16).

    Args:
        causal: rates with a causal mask, which counts half the FLOPs of `full`.
        full: rates without a mask, which counts 4 x queries x keys x head dim x heads FLOPs in the forward
            pass.
    """

    kernel: str
    causal: PassCurves
    full: PassCurves

    def map(self, change: Callable[[Curve], Curve]) -> Attention:
        """Return the kernel's rates with the function `change` applied to each of the four curves."""
        causal, full = (PassCurves(change(p.forward), change(p.backward)) for p in (self.causal, self.full))
        return Attention(self.kernel, causal, full)

    @property
    def curves(self) -> dict[str, Curve]:
        """The four curves of the kernel by name."""
        masks = (("causal", self.causal), ("full", self.full))
        return {f"{mask} {name}": curve for mask, passes in masks for name, curve in vars(passes).items()}


@dataclass(frozen=True)
class Nominal(Strict):
    """Dense rates of a GPU by its datasheet, TFLOP/s; a precision that the GPU lacks is left out.

    Args:
        bf16: rate in bf16.
        fp16: rate in fp16.
        fp8: rate in fp8.
        tf32: rate in tf32.
        fp32: rate in fp32.
    """

    bf16: Rate | None = None
    fp16: Rate | None = None
    fp8: Rate | None = None
    tf32: Rate | None = None
    fp32: Rate | None = None


@dataclass(frozen=True)
class Link(Strict):
    """A link inside a node.

    Args:
        kind: name of the link in reports: NVLink4, PCIe5, …
        bandwidth_gb_s: bandwidth that each GPU achieves, 10^9 bytes/s per direction.
        latency_us: latency of one message, µs.
        nominal_gb_s: bandwidth by datasheet, 10^9 bytes/s per direction.
        unit_parts: part of a GPU's links that NCCL's rings over a unit of so many consecutive GPUs can take,
            by tensor-parallel size, where links are no switch's; 1 for sizes left out.
        source: source of the measurement.
        estimate: derivation of the figures, if they were not measured.
    """

    kind: Text
    bandwidth_gb_s: Rate
    latency_us: Latency
    nominal_gb_s: Rate | None = None
    unit_parts: Mapping[int, Rate] = field(default_factory=dict, hash=False)
    source: Text | None = None
    estimate: Text | None = None


@dataclass(frozen=True)
class Host(Strict):
    """The host memory of nodes with a GPU model; a node's own `host` overrides it.

    Args:
        usable_gib: host memory that a job may pin for each GPU of the node, GiB.
        bandwidth_gb_s: bandwidth of copies between each GPU and pinned memory while all GPUs copy, 10^9
            bytes/s per direction.
        memory_gb_s: bandwidth of host memory for the processes of each GPU while all use it, 10^9 bytes/s.
        source: source of the measurement.
        estimate: derivation of the figures, if they were not measured.
    """

    usable_gib: Memory
    bandwidth_gb_s: Rate
    memory_gb_s: Rate
    source: Text | None = None
    estimate: Text | None = None


@dataclass(frozen=True)
class Device:
    """A GPU model with its memory, links and achieved rates.

    Args:
        memory_gb: memory as the vendor sells it, 10^9 bytes.
        usable_gib: memory that a process finds free on the GPU, GiB.
        memory_gb_s: bandwidth of the GPU's memory by datasheet, 10^9 bytes/s.
        matmul: achieved rate of matrix products against their rows, in bf16 (fp16 on GPUs without bf16).
        attentions: achieved rates of attention kernels: the cluster file's kernels before the catalogue's,
            each from fastest to slowest (causal, forward, 16k tokens).
        matmul_fp8: achieved rate of matrix products in fp8 with one scale a tensor; ``None`` if not known.
        matmul_blockwise: likewise with a scale for each block of 128 elements, or of 128 x 128 of a weight.
        matmul_mxfp8: likewise with a scale for each 32 elements.
        layer_share: fraction of these rates that the matrix products of a training layer reach; 1 if the
            curves were measured in a layer.
        of_single_cards: whether `matmul` was measured on single cards, and not on all those of a cluster.
        host: host memory of the node; ``None``: unknown, so plans do not offload to it.
        call_us: time that the host takes to call an operation on the GPU, µs; 0: not counted.
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
    matmul_blockwise: Curve | None = None
    matmul_mxfp8: Curve | None = None
    layer_share: float = 1.0
    of_single_cards: bool = False
    host: Host | None = None
    call_us: float = 0.0

    @property
    def layer_matmul(self) -> Curve:
        """Achieved rate of the matrix products of a training layer: `matmul` times `layer_share`."""
        return self.matmul.scaled(self.layer_share)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the attention kernels whose rates are known, the default kernel first."""
        return tuple(attention.kernel for attention in self.attentions)

    @property
    def curves(self) -> dict[str, Curve]:
        """All curves of the GPU by name."""
        curves = {"matmul": self.matmul}
        curves |= {name.replace("_", " "): curve for name, curve in self._in_fp8.items() if curve is not None}
        for attention in self.attentions:
            curves |= {f"{attention.kernel} {name}": curve for name, curve in attention.curves.items()}
        return curves

    def attention(self, kernel: str | None = None) -> Attention:
        """Return the achieved rates of an attention kernel; ``None`` stands for the default kernel."""
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

    def fp8_matmul(self, recipe: Fp8Recipe) -> Curve | None:
        """Return the rate of matrix products by a recipe of fp8; ``None`` if none is known."""
        return self._in_fp8.get(f"matmul_{recipe}", self.matmul_fp8)

    @property
    def without_fp8(self) -> Device:
        """This GPU without its rates in fp8."""
        nothing: dict[str, Any] = dict.fromkeys(FP8_CURVES)
        return replace(self, **nothing)

    @property
    def _in_fp8(self) -> dict[str, Curve | None]:
        return {name: getattr(self, name) for name in FP8_CURVES}

    def at_speed(self, factor: float) -> Device:
        """Return this GPU with all rates multiplied by `factor`, as of a throttled or a hypothetical GPU."""
        if factor == 1:
            return self
        in_fp8: dict[str, Any] = {
            name: None if curve is None else curve.scaled(factor) for name, curve in self._in_fp8.items()
        }
        return replace(
            self,
            matmul=self.matmul.scaled(factor),
            attentions=tuple(item.map(lambda curve: curve.scaled(factor)) for item in self.attentions),
            **in_fp8,
        )

    def with_memory(self, memory_gb: float) -> Device:
        """Return this GPU with `memory_gb` of memory, of which the same fraction is usable."""
        return replace(self, memory_gb=memory_gb, usable_gib=self.usable_gib * memory_gb / self.memory_gb)
