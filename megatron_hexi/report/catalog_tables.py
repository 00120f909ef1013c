"""The device catalogue as tables for a terminal, and as plain values for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Curve, Device

#: Tokens at which the overview reads attention's rates.
OVERVIEW_TOKENS = 16384
#: Sizes in the table of a GPU.
TABLE_SIZES = (1, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_CAPTION = (
    "rates in TFLOP/s, achieved unless nominal; attention: causal, 16k tokens, head dim 128, forward / "
    "backward; link: GB/s a direction to the GPUs of a node; ~ an estimate"
)


def catalog_table(devices: Sequence[Device]) -> Table:
    """Return a table of all devices, with a line for each attention kernel."""
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in (
        "GPU",
        "memory GB",
        "usable GiB",
        "nominal",
        "matmul",
        "attention kernel",
        "fwd / bwd",
        "link",
        "GB/s",
    ):
        is_text = name in ("GPU", "attention kernel", "link")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "GPU")
    for device in devices:
        nominal = device.nominal.bf16 or device.nominal.fp16
        passes = [attention.causal for attention in device.attentions]
        table.add_row(
            device.name,
            f"{device.memory_gb:g}",
            f"~{device.usable_gib:.1f}",
            "" if nominal is None else f"{nominal:,.0f}",
            _rate(device.matmul, device.matmul.sizes[-1]),
            "\n".join(device.kernels),
            "\n".join(" / ".join(_rate(c, OVERVIEW_TOKENS) for c in (p.forward, p.backward)) for p in passes),
            device.link.kind,
            ("~" if device.link.estimate else "") + f"{device.link.bandwidth_gb_s:g}",
            end_section=True,
        )
    return table


def device_report(device: Device) -> RenderableType:
    """Return the facts and curves of a device, with their sources."""
    nominal = ", ".join(
        f"{key} {value:g}" for key, value in vars(device.nominal).items() if value is not None
    )
    memory = (
        f"{device.memory_gb:g} GB at {device.memory_gb_s:,.0f} GB/s, about {device.usable_gib:g} GiB usable"
    )
    link = device.link
    way = f"{link.kind}, {link.bandwidth_gb_s:g} GB/s a direction, {link.latency_us:g} µs"
    facts = [
        f"{device.name}: {memory}, compute capability {'.'.join(map(str, device.capability))}",
        f"nominal TFLOP/s, dense: {nominal} ({device.source})",
        f"in a node: {way} ({_origin(link.source, link.estimate)})",
    ]
    if device.host is not None:
        host = device.host
        facts.append(
            f"host memory: about {host.usable_gib:g} GiB per GPU, {host.bandwidth_gb_s:g} GB/s per direction "
            f"({_origin(host.source, host.estimate)})"
        )
    if device.note:
        facts.append(f"note: {device.note}")
    table = Table(
        caption="TFLOP/s against rows (matmul) or tokens (attention, head dim 128); ~ an estimate, or below "
        "the sizes that the source gives",
        caption_justify="left",
    )
    table.add_column("curve", no_wrap=True)
    for size in TABLE_SIZES:
        table.add_column(_size(size), justify="right")
    for name, curve in device.curves.items():
        table.add_row(name, *(_rate(curve, size) for size in TABLE_SIZES))
    return Group(*map(Text, facts), table, *map(Text, _sources(device)))


def device_dict(device: Device) -> dict[str, Any]:
    """Return a device as plain values; `curves` by name, without `attentions`."""
    data = {
        key: value for key, value in dataclasses.asdict(device).items() if key not in ("matmul", "attentions")
    }
    for part in filter(None, (data["link"], data["host"])):
        part |= {"source": part["source"] or part["estimate"], "estimate": part["source"] is None}
    data["kernels"] = device.kernels
    data["curves"] = {name: dataclasses.asdict(curve) for name, curve in device.curves.items()}
    return data


def _origin(source: str | None, estimate: str | None) -> str:
    return source or f"estimate: {estimate}"


def _rate(curve: Curve, size: float) -> str:
    rate = curve.rate(size)
    text = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 0.1 else f"{rate:.2g}"
    return ("~" if curve.estimate or size < curve.given_from else "") + text


def _size(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)


def _sources(device: Device) -> list[str]:
    """Return a line for each source, with its curves; a kernel's name stands for its four curves."""
    names: dict[tuple[bool, str], list[str]] = {}
    for name, curve in device.curves.items():
        names.setdefault((curve.estimate, curve.source), []).append(name)
    lines = []
    for (estimate, source), curves in names.items():
        for attention in device.attentions:
            four = [f"{attention.kernel} {name}" for name in attention.curves]
            if set(four) <= set(curves):
                curves[curves.index(four[0])] = attention.kernel
                curves = [name for name in curves if name not in four]
        lines.append(f"{', '.join(curves)}: {'estimate: ' if estimate else ''}{source}")
    return lines
