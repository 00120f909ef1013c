"""Plans and the device catalogue as tables for a terminal and for a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Curve, Device
from megatron_hexi.grouping import grouped
from megatron_hexi.models import Model
from megatron_hexi.plan import Estimate, JobTerms, Plan, Provenance, Traffic, Workload
from megatron_hexi.plan.recompute import spell_recompute
from megatron_hexi.report.unit_summary import UnitSummary
from megatron_hexi.spelling import spell_bytes, spell_range, spell_runs


class Report(JupyterMixin, Group):
    """Lines and tables one below the other: ``rich`` prints them, and a notebook shows them as HTML."""

    def _repr_html_(self) -> str:
        """Return the HTML that Jupyter shows, for notebooks that cannot choose among several MIME types."""
        return str(self._repr_mimebundle_([], [])["text/html"])


def make_table(columns: Sequence[str], words: Sequence[str] = (), caption: str | None = None) -> Table:
    """Return a table without rows, whose columns are of numbers, or of words, which begin at the left."""
    table = Table(caption=caption, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    return table


#: Names of the parts of a layer as all decoders have them.
_USUAL = ("full attention", "dense MLP")


def kind_names(model: Model) -> tuple[str, ...]:
    """Return a name for each kind of layer, by the parts in which kinds differ; one empty name if alike."""
    if model.is_uniform:
        return ("",)
    # In a hybrid a layer is one part, which is its name; else parts are named in which layers may differ.
    columns = zip(*(kind.titles for kind in model.kinds), strict=True)
    named = [titles for titles, usual in zip(columns, _USUAL, strict=True) if set(titles) != {usual}]
    precisions = tuple("bf16" if kind.stays_in_bf16 else "fp8" for kind in model.kinds)
    named += [precisions] if "bf16" in precisions else []
    return tuple(" and ".join(filter(None, words)) for words in zip(*named, strict=True))


_CAPTION = "heads and positions: first-last; sent: bytes a layer and sequence in bf16, forward + backward"


def _always(plan: Plan, rows: Sequence[UnitSummary]) -> bool:
    return True


#: Columns of the table of units, and when each is shown.
_COLUMNS: dict[str, Callable[[Plan, Sequence[UnitSummary]], bool]] = {
    "replica": lambda plan, rows: len(plan.replicas) > 1,
    "stage": lambda plan, rows: rows[0].layers is not None,
    "layers": lambda plan, rows: rows[0].layers is not None,
    "ministages": lambda plan, rows: plan.has_ministages,
    "offload": lambda plan, rows: plan.has_offload,
    "recompute": lambda plan, rows: any(row.recompute is not None for row in rows),
    "rank": _always,
    "samples": lambda plan, rows: any(row.samples is not None for row in rows),
    "micro-batches": lambda plan, rows: plan.takes_micro_batches,
    "group": _always,
    "tokens": _always,
    "share": _always,
    "heads": _always,
    "kv heads": _always,
    "experts": lambda plan, rows: any(row.experts is not None for row in rows),
    "state": lambda plan, rows: any(row.state != 1 for row in rows),
    "precision": lambda plan, rows: any(row.precision is not None for row in rows),
    "patches": lambda plan, rows: any(row.patches is not None for row in rows),
    "positions": _always,
    "sent in group": _always,
    "to others": _always,
}


def plan_report(plan: Plan, rows: Sequence[UnitSummary]) -> RenderableType:
    """Return the plan for a terminal: workload, units, and the planner's estimate."""
    parts: list[RenderableType] = [Text(_workload_line(plan.workload)), units_table(plan, rows)]
    if (plan.job.virtual_stages or 1) > 1:
        parts.append(Text(_chunks_line(plan.job)))
    if plan.gpus is not None:
        parts.append(Text(_gpus_line(plan.gpus)))
    if plan.estimate is not None:
        parts.append(Text(_estimate_line(plan.estimate)))
        if plan.estimate.against:
            parts.append(against_table(plan.estimate.against, plan.estimate.tokens_per_s))
    if plan.provenance is not None:
        parts.append(Text(_provenance_line(plan.provenance)))
    return Group(*parts)


def units_table(plan: Plan, rows: Sequence[UnitSummary]) -> Table:
    """Return a line for each unit, by replica, stage and group; without empty columns."""
    rows = sorted(rows, key=lambda row: row.place)
    table = Table(caption=_CAPTION, caption_justify="left")
    columns = [name for name, says in _COLUMNS.items() if says(plan, rows)]
    for name in columns:
        table.add_column(name, justify="left" if name in ("group", "positions") else "right", overflow="fold")
    for number, row in enumerate(rows):
        following = rows[number + 1] if number + 1 < len(rows) else row
        cells: dict[str, str | Text] = {
            "replica": str(row.replica),
            "stage": str(row.stage),
            "layers": ", ".join(map(spell_range, row.layer_ranges)),
            "ministages": ""
            if row.ministages is None
            else ", ".join(filter(None, (str(len(row.ministages)), row.order))),
            "offload": ", ".join(row.offload or ()),
            "recompute": "" if row.recompute is None else spell_recompute(row.recompute),
            "rank": spell_range((row.ranks[0], row.ranks[-1] + 1)),
            "samples": "all" if row.samples is None else str(row.samples),
            "micro-batches": "all" if row.micro_batches is None else str(row.micro_batches),
            "group": Text(row.group_name or str(row.group)),  # a name may hold what rich takes for markup
            "tokens": f"{row.tokens:,}",
            "share": f"{row.share:.1%}",
            "heads": spell_range(row.heads),
            "kv heads": spell_range(row.kv_heads),
            "experts": "all" if row.experts is None else ", ".join(map(spell_range, row.experts)),
            "state": str(row.state),
            "precision": row.precision or "fp8",
            "patches": "" if row.patches is None else f"{row.patches:,}",
            "positions": ", ".join(map(spell_range, row.segments)) or "none",
            "sent in group": _both_ways(row.forward, row.backward, "all_to_all_bytes"),
            "to others": _both_ways(row.forward, row.backward, "message_bytes"),
        }
        table.add_row(*(cells[name] for name in columns), end_section=following.place != row.place)
    return table


def against_table(against: Mapping[str, float], tokens_per_s: float | None) -> Table:
    """Return a table of the tokens/s predicted for other layouts, the fastest first."""
    ratio_column = [] if tokens_per_s is None else ["the plan is"]
    table = make_table(("predicted instead", "tokens/s", *ratio_column), ("predicted instead",))
    for name, rate in sorted(against.items(), key=lambda item: -item[1]):
        ratio = [] if tokens_per_s is None else [f"{tokens_per_s / rate:.2f}x" if rate else "-"]
        table.add_row(Text(name), f"{rate:,.0f}", *ratio)
    return table


def _both_ways(forward: Traffic, backward: Traffic, name: str) -> str:
    there, back = getattr(forward, name), getattr(backward, name)
    return f"{spell_bytes(there)} + {spell_bytes(back)}" if there or back else "nothing"


def _workload_line(workload: Workload) -> str:
    facts = [
        f"{workload.seq_length:,} tokens",
        f"{workload.heads} heads of {workload.head_dim}, {workload.kv_heads} kv heads",
        "causal" if workload.causal else "not causal",
    ]
    if workload.layers is not None:
        facts.append(f"{workload.layers} layers")
    if workload.hidden_size is not None:
        facts.append(f"hidden size {workload.hidden_size}")
    if workload.tensor_parallel != 1:
        width = workload.tensor_parallel or "differs"
        facts.append(f"tensor parallel {width} (heads below are those of one such rank)")
    return "workload: " + ", ".join(facts)


def _chunks_line(job: JobTerms) -> str:
    stages = "the job's" if job.pipeline_parallel is None else str(job.pipeline_parallel)
    return f"{stages} pipeline stages, of {job.virtual_stages} chunks each: the interleaved schedule"


def _estimate_line(estimate: Estimate) -> str:
    facts = {
        "{:.3f} s per iteration": estimate.iteration_s,
        "{:,.0f} tokens/s": estimate.tokens_per_s,
        "no plan takes less than {:.3f} s": estimate.lower_bound_s,
        "this one takes at most {:.1%} longer than the best": estimate.gap,
        "up to {:.1f} GiB a rank": max(estimate.memory_gib or (), default=None),
    }
    spelt = (text.format(value) for text, value in facts.items() if value is not None)
    return "estimate: " + (", ".join(spelt) or "none")


def _gpus_line(gpus: Sequence[int]) -> str:
    """Return a line with the GPU on which each rank must be started; adjacent GPUs as one range."""
    return f"ranks must be started on these GPUs of the cluster file, in rank order: {spell_runs(gpus)}"


def _provenance_line(provenance: Provenance) -> str:
    facts = {
        "by": provenance.planner,
        "solver": provenance.solver,
        "seed": provenance.seed,
        "cluster": provenance.cluster,
        "model": provenance.model,
        "on": provenance.created,
    }
    return "made: " + (
        ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None) or "by hand"
    )


#: Tokens at which the overview reads attention's rates.
OVERVIEW_TOKENS = 16384
#: Sizes in the table of a GPU.
TABLE_SIZES = (1, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_CATALOG_CAPTION = (
    "rates in TFLOP/s, achieved unless nominal; attention: causal, 16k tokens, head dim 128, forward / "
    "backward; link: GB/s a direction to the GPUs of a node; ~ an estimate"
)


def catalog_table(devices: Sequence[Device]) -> Table:
    """Return a table of all devices, with a line for each attention kernel."""
    memory, attention = ("memory GB", "usable GiB"), ("attention kernel", "fwd / bwd")
    columns = ("GPU", *memory, "nominal", "matmul", *attention, "link", "GB/s")
    table = make_table(columns, ("GPU", "attention kernel", "link"), _CATALOG_CAPTION)
    table.columns[0].no_wrap = True
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
    caption = (
        "TFLOP/s against rows (matmul) or tokens (attention, head dim 128); ~ an estimate, or below the "
        "sizes that the source gives"
    )
    table = make_table(("curve", *map(_size, TABLE_SIZES)), ("curve",), caption)
    table.columns[0].no_wrap = True
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
    names = grouped(((curve.estimate, curve.source), name) for name, curve in device.curves.items())
    lines = []
    for (estimate, source), curves in names.items():
        for attention in device.attentions:
            four = [f"{attention.kernel} {name}" for name in attention.curves]
            if set(four) <= set(curves):
                curves[curves.index(four[0])] = attention.kernel
                curves = [name for name in curves if name not in four]
        lines.append(f"{', '.join(curves)}: {'estimate: ' if estimate else ''}{source}")
    return lines
