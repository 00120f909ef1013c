"""A new plan for a terminal and for --json: speed, lower bound, shares and notes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import assumed_kernels, ceiling_tokens_per_s, estimate, planned_kernels
from megatron_hexi.cost.memory import GIB
from megatron_hexi.models import FROZEN_PARTS, Job, Model
from megatron_hexi.plan import Plan, plan_digest
from megatron_hexi.plan.recompute import spell_recompute
from megatron_hexi.plan.terms import join_kernels
from megatron_hexi.plan.units import domain_rows, expert_domains, rank_gpus
from megatron_hexi.report.estimate import phases_line, spell_throughput
from megatron_hexi.report.share_lines import find_shares, shares_table
from megatron_hexi.report.tables import Report, kind_names
from megatron_hexi.spelling import spell_seconds

if TYPE_CHECKING:  # brings the solver, which a report does not need
    from megatron_hexi.planner import Planned

#: Part of an iteration from which on a kernel that is not in the shipped image is worth a note.
_MATTERS = 0.01
#: Gap to the lower bound below which a plan counts as the best.
_BEST = 5e-4


def planned_report(planned: Planned, cluster: Cluster) -> Report:
    """Return the plan in a few lines and a table."""
    shares = find_shares(planned.plan, planned.job, planned.cost, cluster)
    return Report(
        Text(job_line(planned.job, cluster)),
        *(Text(line) for line in layer_lines(planned.job.model)),
        Text(speed_line(planned, cluster)),
        Text(f"layout: {layout_line(planned.plan, planned.job)}"),
        *(Text(line) for line in choice_lines(planned)),
        *(Text(line) for line in expert_lines(planned.plan, cluster)),
        *(Text(line) for line in kernel_lines(planned, cluster)),
        Text(bound_line(planned)),
        Text(phases_line(planned.cost)),
        shares_table(shares, planned.job),
        *(Text(line) for line in _notes(planned, cluster)),
    )


def planned_dict(planned: Planned, cluster: Cluster) -> dict[str, Any]:
    """Return the plan's prediction as plain values: seconds, GiB, tokens/s."""
    cost, ceiling = planned.cost, cluster_ceiling(planned.job, cluster)
    return {
        "digest": plan_digest(planned.plan),
        "ranks": len(cost.ranks),
        "data_parallel": planned.job.data_parallel,
        "kernels": planned_kernels(planned.job.kernel, cluster),
        "tokens_per_s": cost.tokens_per_s,
        **cost.throughput.facts,
        "iteration_s": cost.iteration_s,
        "lower_bound_s": planned.bound.iteration_s,
        "bound_reason": planned.bound.reason,
        "gap": planned.gap,
        "ceiling_tokens_per_s": ceiling,
        "share_of_ceiling": cost.tokens_per_s / ceiling,
        "memory_gib": list(cost.memory_gib),
        "phases_s": cost.phases.by_name,
        "idle_share": cost.idle_share,
        "shares": [vars(share) for share in find_shares(planned.plan, planned.job, cost, cluster)],
        "gpus": None if planned.plan.gpus is None else list(planned.plan.gpus),
        **_choice_dict(planned),
        "notes": list(planned.notes),
        "trials": planned.trials,
        "planning_s": planned.planning_s,
    }


def job_dict(job: Job) -> dict[str, Any]:
    """Return the job as plain values, with the model's name."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    images = {} if job.images is None else {"images": vars(job.images)}
    fields.pop("images")
    return fields | {"model": job.model.name, "documents": _documents_dict(job)} | images


def _documents_dict(job: Job) -> dict[str, Any] | None:
    documents = job.documents
    if documents is None:
        return None
    return {
        "shortest": documents.lengths[0],
        "longest": documents.lengths[-1],
        "mean": documents.mean,
        "pairs_per_sequence": documents.pairs(job.seq_length),
        "dealt": documents.dealt,
    }


def job_line(job: Job, cluster: Cluster) -> str:
    """Return a line with model, context, batch, and the cluster's GPUs by kind."""
    counts: Mapping[str, int] = Counter(rank.device.name for rank in cluster.ranks)
    gpus = ", ".join(f"{count} x {name}" for name, count in counts.items())
    scales = f", fp8 by {job.fp8_recipe} scales" if job.precision == "fp8" else ""
    return (
        f"{job.model.name}, {job.seq_length:,} tokens{_spell_documents(job)}{_spell_images(job)}, "
        f"global batch {job.global_batch_size}{scales}, on {cluster.name}: {gpus}"
    )


def _spell_documents(job: Job) -> str:
    documents = job.documents
    if documents is None:
        return ""
    shared = "dealt out anew in every batch" if documents.dealt else "each cut over all groups"
    mean = f"{documents.mean:,.0f}"
    return f" in documents of {documents.lengths[0]:,} to {documents.lengths[-1]:,} (mean {mean}), {shared}"


def _spell_images(job: Job) -> str:
    images = job.images
    if images is None:
        return ""
    frozen = " and ".join(FROZEN_PARTS[name] for name in images.frozen)
    more = f"{job.image_tokens:,.0f} tokens" + (f", {frozen} frozen" if frozen else "")
    return f" with {images.per_sequence:,} images of {images.patches:,} patches ({more})"


def expert_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Return a line with the experts of a layer that each model of GPU holds, if units hold any."""
    total = plan.workload.experts
    if total is None:
        return []
    gpus = rank_gpus(plan, len(cluster.ranks))
    counts: dict[str, set[int]] = {}
    sizes, ways = set(), set()
    for replica in plan.replicas:
        for stage in replica.stages:
            ways.add("to each of their experts" if stage.expert_nodes is None else "once to each node")
            for domain in expert_domains(stage, total):
                sizes.add(len(domain))
                for held in domain:
                    name = cluster.ranks[gpus[held.rank]].device.name
                    counts.setdefault(name, set()).add(held.count)
    each = ", ".join(f"{_range(numbers)} on a {name}" for name, numbers in counts.items())
    spread = f"tokens travel between {_range(sizes)} GPUs, {' or '.join(sorted(ways))}"
    return [f"experts: of {total} in a layer {each}; {spread}"]


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def layer_lines(model: Model) -> list[str]:
    """Return lines with the weights that a token uses, and the layers of each kind, where they differ."""
    lines = []
    if model.experts is not None:
        total, active = (f"{count / 1e9:,.1f} billion" for count in (model.total_params, model.active_params))
        lines = [f"weights: {total}, of which a token goes through {active}"]
    if not model.is_uniform:
        named = zip(model.kinds, kind_names(model), strict=True)
        lines.append(f"layers: {', '.join(f'{kind.layers} with {name}' for kind, name in named)}")
    if model.mtp_layers:
        weights = f"{model.mtp_params / 1e9:,.1f} billion weights"
        lines.append(f"multi-token prediction: {model.mtp_layers} on each last stage ({weights})")
    return lines


def speed_line(planned: Planned, cluster: Cluster) -> str:
    """Return a line with the plan's predicted speed."""
    cost, ceiling = planned.cost, cluster_ceiling(planned.job, cluster)
    return (
        f"predicted: {cost.tokens_per_s:,.0f} tokens/s ({spell_throughput(cost.throughput)}), "
        f"{spell_seconds(cost.iteration_s)} s per iteration: "
        f"{cost.tokens_per_s / ceiling:.1%} of the ceiling of {ceiling:,.0f} tokens/s"
    )


def layout_line(plan: Plan, job: Job) -> str:
    """Return a layout in Megatron's terms."""
    words = [f"{len(plan.replicas)} replica{'s' if len(plan.replicas) > 1 else ''}"]
    rows = domain_rows(plan, stages=job.pipeline_parallel)
    words.append(f"PP {_listed(sorted({row.depth for row in rows}))}")
    if job.virtual_stages > 1:
        words.append(f"{job.virtual_stages} chunks a stage")
    words.append(f"TP {_listed(sorted({row.width for row in rows}))}")
    if all(row.recompute is None for row in rows):
        words.append(f"recompute {spell_recompute(job.recompute)}")
    return f"{', '.join(words)}, micro-batch {job.micro_batch_size}"


def choice_lines(planned: Planned) -> list[str]:
    """Return lines with the plan's means beyond Megatron's flags, and with faster or simpler plans."""
    choice = planned.choice
    if choice is None:
        return []
    lines = [f"beyond Megatron's flags on all GPUs: {', '.join(choice.means) or 'nothing'}"]
    others = (("faster", choice.fastest, "--fastest"), ("simpler", choice.simplest, "--simplest"))
    for name, other, flag in others:
        if other is not None:
            more = [word for word in other.means if word not in choice.means]
            less = [word for word in choice.means if word not in other.means]
            both = ("with", more), ("without", less)
            words = [f"{word} {' and '.join(means)}" for word, means in both if means]
            part = other.candidate.iteration_s / planned.cost.iteration_s - 1
            time = f"{part:.1%} longer" if part >= 0 else f"{-part:.1%} less time"
            layout = layout_line(other.candidate.plan, other.candidate.job)
            lines.append(f"{name}: {layout}, {', '.join(words)}, takes {time} ({flag})")
    return lines


def _choice_dict(planned: Planned) -> dict[str, Any]:
    """Return the plan's means, and plans that are faster or simpler, as plain values."""
    choice = planned.choice
    if choice is None:
        return {}
    found: dict[str, Any] = {"means": list(choice.means)}
    for name, other in (("fastest", choice.fastest), ("simplest", choice.simplest)):
        found[name] = other and {
            "layout": layout_line(other.candidate.plan, other.candidate.job),
            "means": list(other.means),
            "iteration_s": other.candidate.iteration_s,
        }
    return found


def kernel_lines(planned: Planned, cluster: Cluster) -> list[str]:
    """Return lines with the plan's attention kernels, and notes on kernels that are only assumed."""
    job = planned.job
    kernels = planned_kernels(job.kernel, cluster)
    lines = [f"attention kernel: {', '.join(f'{kernel} on {gpu}' for gpu, kernel in kernels.items())}"]
    for gpu, (assumed, shipped) in assumed_kernels(job.kernel, cluster, job.model.kernel_dim).items():
        own = dataclasses.replace(job, kernel=join_kernels(kernels | {gpu: shipped}))
        plan = dataclasses.replace(planned.plan, job=dataclasses.replace(planned.plan.job, kernel=None))
        longer = estimate(plan, own, cluster).iteration_s / planned.cost.iteration_s - 1
        if longer >= _MATTERS:
            lines.append(
                f"note: {assumed} is assumed on {gpu}; the shipped image has {shipped}, with which this plan "
                f"takes {longer:.1%} longer: build {assumed}, or plan with --kernel {gpu}={shipped}"
            )
    return lines


def assumption_lines(cluster: Cluster, plan: Plan) -> list[str]:
    """Return a note on each assumed kernel that the shipped image lacks, with the kernel that it has."""
    planned, head_dim = plan.job.kernel or {}, max(plan.workload.head_dim, plan.workload.value_size)
    return [
        f"note: {assumed} was assumed on {gpu}; the shipped image has none: without it, plan with "
        f"--kernel {gpu}={shipped}"
        for gpu, (assumed, shipped) in assumed_kernels(None, cluster, head_dim).items()
        if planned.get(gpu) == assumed
    ]


def host_lines(planned: Planned, cluster: Cluster) -> list[str]:
    """Return lines with the host memory that a plan uses, and a remedy where its size is only assumed."""
    most: dict[str, float] = {}
    for rank in planned.cost.ranks:
        needed = rank.host_memory.total / GIB
        most[rank.device] = max(most.get(rank.device, 0.0), needed)
    lines = []
    for device in dict.fromkeys(rank.device for rank in cluster.ranks):
        host, needed = device.host, most.get(device.name, 0.0)
        if host is None or not needed:
            continue
        line = (
            f"host memory beside {device.name}: {needed:.1f} of {host.usable_gib:,.0f} GiB per GPU are used, "
            f"copied at {host.bandwidth_gb_s:g} GB/s"
        )
        if host.estimate:
            line += (
                "; both are assumed: say under host: in the cluster file what is there (hexi probe measures)"
            )
        lines.append(f"note: {line}")
    return lines


def fabric_lines(planned: Planned, cluster: Cluster) -> list[str]:
    """Return a note where a plan's GPUs are in several fabrics, which NCCL does not use side by side."""
    gpus = rank_gpus(planned.plan, len(cluster.ranks))
    used = (cluster.nodes[cluster.ranks[gpu].node].cards for gpu in gpus)
    fabrics = list(dict.fromkeys(cards.fabric for cards in used if cards is not None))
    if len(fabrics) <= 1:
        return []
    meeting = estimate(planned.plan, planned.job, cluster.over_meeting_cards())
    longer = meeting.iteration_s / planned.cost.iteration_s - 1
    note = (
        f"times count {' and '.join(fabrics)} side by side, which NCCL's variables do not give: with all "
        f"traffic on the cards where they meet, as hexi doctor sets it, this plan takes {longer:.1%} longer "
        "(docs/cluster-file.md, Several fabrics)"
    )
    return [f"note: {note}"]


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def bound_line(planned: Planned) -> str:
    """Return a line with the lower bound and the plan's distance from it."""
    bound = planned.bound
    far = f"at most {planned.gap:.1%} longer" if planned.gap > _BEST else "no longer: it is the best"
    return (
        f"lower bound: by the cost model's closed form no layout takes less than "
        f"{spell_seconds(bound.iteration_s)} s per iteration "
        f"({bound.reason.rstrip('.')}); this one takes {far}"
    )


def cluster_ceiling(job: Job, cluster: Cluster) -> float:
    """Return tokens/s if all GPUs of the cluster, used or not, worked at their best rates.

    Without communication and without recomputation.
    """
    alone = dataclasses.replace(job, recompute="none")
    return ceiling_tokens_per_s(alone, [rank.device for rank in cluster.ranks])


def _notes(planned: Planned, cluster: Cluster) -> list[str]:
    lines = [f"note: {note}" for note in planned.notes]
    lines += [*host_lines(planned, cluster), *fabric_lines(planned, cluster)]
    if planned.plan.gpus is not None:
        lines.append(
            "note: ranks must be started on the GPUs that the plan names, as the lines below do "
            "(hexi show lists them)"
        )
    return [*lines, f"planned in {planned.planning_s:.1f} s, {planned.trials} layouts timed"]
