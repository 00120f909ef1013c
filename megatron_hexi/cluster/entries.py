"""The YAML format of devices, in the catalogue and under ``devices:`` in a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from megatron_hexi.cluster.device import (
    FP8_CURVES,
    Attention,
    Curve,
    Device,
    Host,
    Link,
    Nominal,
    PassCurves,
)
from megatron_hexi.cluster.schema import Memory, Name, Rate, Size, Text, refuse
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import Strict

Points = Annotated[tuple[tuple[Size, Rate], ...], Field(min_length=1, max_length=1000)]

Mask = Literal["causal", "full"]
Pass = Literal["forward", "backward"]
MASKS: tuple[Mask, ...] = ("causal", "full")


@dataclass(frozen=True)
class CurveEntry(Strict):
    """A curve of achieved rates against size: `points`, and either `source` or `estimate`.

    Args:
        points: pairs of a size (rows of a matrix product, tokens of a sequence) and a rate in TFLOP/s, by
            ascending size.
        source: link to the measurement.
        estimate: derivation of the rates, if they were not measured.
        half: size, below the first point, at which half the rate is reached; left out: it is estimated.
    """

    points: Points
    source: Text | None = None
    estimate: Text | None = None
    half: Size | None = None


@dataclass(frozen=True)
class PassesEntry(Strict):
    """Curves of the forward and the backward pass.

    Args:
        forward: curve of the forward pass.
        backward: curve of the backward pass, which counts 2.5 times the FLOPs of the forward pass.
    """

    forward: CurveEntry | None = None
    backward: CurveEntry | None = None


@dataclass(frozen=True)
class AttentionEntry(Strict):
    """The curves of one attention kernel: given here, or the curves of another GPU (`like`) times a factor.

    Args:
        causal: curves with a causal mask, which counts half the FLOPs of `full`.
        full: curves without a mask.
        like: name of another GPU whose curves of this kernel are used.
        times: factor on the rates of the other GPU.
        estimate: reason for the factor.
    """

    causal: PassesEntry | None = None
    full: PassesEntry | None = None
    like: Text | None = None
    times: Rate = 1.0
    estimate: Text | None = None


@dataclass(frozen=True)
class DeviceEntry(Strict):
    """A GPU model; fields that are left out are those of the catalogue's GPU with the same name.

    Args:
        memory_gb: memory as the vendor sells it, 10^9 bytes.
        usable_gib: memory that a process finds free on the GPU, GiB.
        memory_gb_s: bandwidth of the GPU's memory by datasheet, 10^9 bytes/s.
        capability: CUDA compute capability, major and minor.
        nominal: rates by datasheet.
        link: link to the other GPUs of the node.
        host: host memory of the node; without this field plans do not offload.
        matmul: achieved rate of matrix products against their rows.
        matmul_fp8: achieved rate of matrix products in fp8 against their rows, with one scale a tensor.
        matmul_blockwise: likewise with scales of blocks of 128.
        matmul_mxfp8: likewise in MXFP8.
        attention: achieved rates of each attention kernel against tokens, with heads of 128.
        source: datasheet of the GPU.
        note: remark in reports.
    """

    memory_gb: Memory | None = None
    usable_gib: Memory | None = None
    memory_gb_s: Rate | None = None
    capability: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    nominal: Nominal | None = None
    link: Link | None = None
    host: Host | None = None
    matmul: CurveEntry | None = None
    matmul_fp8: CurveEntry | None = None
    matmul_blockwise: CurveEntry | None = None
    matmul_mxfp8: CurveEntry | None = None
    attention: dict[Name, AttentionEntry] | None = None
    source: Text | None = None
    note: Text | None = None


@dataclass(frozen=True)
class Builder:
    """A builder of devices from their entries in a YAML document.

    Args:
        halves: number of tokens at which attention reaches half its rate, by mask and pass.
        citations: full citation for each one-word `source`.
        layer_share: `Device.layer_share` of devices whose `matmul` is in the document.
        of_single_cards: `Device.of_single_cards` of these.
        call_us: `Device.call_us` of devices that are not known before.
    """

    source: YamlFile
    known: Mapping[str, Device]
    halves: Mapping[Mask, Mapping[Pass, float]]
    citations: Mapping[str, str]
    layer_share: float
    of_single_cards: bool
    call_us: float

    def device(self, name: str, entry: DeviceEntry) -> Device:
        """Return the device of an entry."""
        place, base = ("devices", name), self.known.get(name)

        def need[T](field: str, value: T | None, inherit: Callable[[Device], T]) -> T:
            if value is not None:
                return value
            if base is None:
                remedy = "add it: the catalogue has no GPU of that name to take it from"
                refuse(self.source, (*place, field), "is missing", remedy)
            return inherit(base)

        memory_gb = need("memory_gb", entry.memory_gb, lambda d: d.memory_gb)
        usable = need("usable_gib", entry.usable_gib, lambda d: d.usable_gib * memory_gb / d.memory_gb)
        bandwidth = need("memory_gb_s", entry.memory_gb_s, lambda d: d.memory_gb_s)
        matmul = self._matmul(entry.matmul, bandwidth, (*place, "matmul")) if entry.matmul else None
        in_fp8 = {field: getattr(base, field, None) for field in FP8_CURVES}
        for field in FP8_CURVES:
            curve = getattr(entry, field)
            if curve is not None:
                in_fp8[field] = self._matmul(curve, 2 * bandwidth, (*place, field))
        link = self._cited(entry.link, (*place, "link")) if entry.link else None
        host = self._cited(entry.host, (*place, "host")) if entry.host else None
        kernels = {item.kernel: item for item in base.attentions} if base else {}
        for kernel, item in (entry.attention or {}).items():
            kernel_place = (*place, "attention", kernel)
            kernels[kernel] = self._attention(kernel, item, kernels.get(kernel), kernel_place)
        if not kernels:
            refuse(self.source, (*place, "attention"), "has no kernel", "give the curves of one")

        def rank(item: Attention) -> tuple[bool, float]:
            # What the file gives curves of is what runs there, though the catalogue knows a faster one.
            return item.kernel in (entry.attention or {}), item.causal.forward.rate(16384)

        return Device(
            name=name,
            memory_gb=memory_gb,
            usable_gib=usable,
            memory_gb_s=bandwidth,
            capability=need("capability", entry.capability, lambda d: d.capability),
            nominal=need("nominal", entry.nominal, lambda d: d.nominal),
            link=need("link", link, lambda d: d.link),
            matmul=need("matmul", matmul, lambda d: d.matmul),
            attentions=tuple(sorted(kernels.values(), key=rank, reverse=True)),
            source=self._cite(entry.source) or (base.source if base else "the cluster file"),
            note=entry.note or (base.note if base else ""),
            **in_fp8,
            layer_share=base.layer_share if base and not matmul else self.layer_share,
            of_single_cards=base.of_single_cards if base and not matmul else self.of_single_cards,
            host=host or (base.host if base else None),
            call_us=base.call_us if base else self.call_us,
        )

    def _cite(self, text: str | None) -> str:
        return self.citations.get(text or "", text or "")

    def _origin(self, source: str | None, estimate: str | None, place: Place) -> tuple[str, bool]:
        if (source is None) == (estimate is None):
            found = "has neither source nor estimate" if source is None else "has both source and estimate"
            remedy = "say who measured it (source), or how it was guessed (estimate)"
            refuse(self.source, place, found, remedy)
        return (self._cite(source), False) if source else (estimate or "", True)

    def _curve(self, entry: CurveEntry, half: float, place: Place) -> Curve:
        text, estimate = self._origin(entry.source, entry.estimate, place)
        for i, ((before, _), (after, _)) in enumerate(pairwise(entry.points), start=1):
            if after <= before:
                problem = f"has size {after:g} after {before:g}"
                refuse(self.source, (*place, "points", i), problem, "list the sizes in ascending order")
        first, rate = entry.points[0]
        half = entry.half or half
        small = []
        size = 1.0
        while size < first:  # the saturating rule, once an octave
            small.append((size, rate * (size / (size + half)) / (first / (first + half))))
            size *= 2
        sizes, rates = zip(*small, *entry.points, strict=True)
        return Curve(sizes, rates, text, estimate, first)

    def _matmul(self, entry: CurveEntry, memory_gb_s: float, place: Place) -> Curve:
        # Rows from which a product computes for longer than it reads its two-byte weights:
        # rows x 2 FLOPs a weight at the achieved rate = 2 bytes a weight at the memory's bandwidth, which
        # is worth twice as much for weights of one byte.
        return self._curve(entry, max(1.0, entry.points[-1][1] * 1e3 / memory_gb_s), place)

    def _cited[T: (Link, Host)](self, entry: T, place: Place) -> T:
        self._origin(entry.source, entry.estimate, place)
        return replace(entry, source=self._cite(entry.source) or None)

    def _attention(
        self, kernel: str, entry: AttentionEntry, base: Attention | None, place: Place
    ) -> Attention:
        if entry.like is not None:
            base = self._alike(kernel, entry, place)

        def curve(mask: Mask, direction: Pass) -> Curve:
            given: CurveEntry | None = getattr(getattr(entry, mask), direction, None)
            curve_place = (*place, mask, direction)
            if given:
                return self._curve(given, self.halves[mask][direction], curve_place)
            if base is None:
                remedy = "add it: nothing is known of this kernel on this GPU"
                refuse(self.source, curve_place, "is missing", remedy)
            return base.curves[f"{mask} {direction}"]

        causal, full = (PassCurves(curve(mask, "forward"), curve(mask, "backward")) for mask in MASKS)
        return Attention(kernel, causal, full)

    def _alike(self, kernel: str, entry: AttentionEntry, place: Place) -> Attention:
        device = self.known.get(entry.like or "")
        if device is None or kernel not in device.kernels:
            problem = f"= {entry.like!r} is no GPU with curves for {kernel}"
            remedy = "name one that `hexi catalog` shows with that kernel"
            refuse(self.source, (*place, "like"), problem, remedy)
        if entry.estimate is None:
            refuse(self.source, (*place, "estimate"), "is missing", "say why the two GPUs are alike")
        note = f"{entry.like} x {entry.times:g}: {entry.estimate}"
        return device.attention(kernel).map(
            lambda curve: replace(curve.scaled(entry.times), source=note, estimate=True)
        )
