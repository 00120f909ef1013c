"""``hexi plan`` and ``hexi compare``: plan a job on a cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_hexi.cli.bundles import with_bundles
from megatron_hexi.cli.launch import find_lines, say_trial
from megatron_hexi.cli.options import ClusterPath, NewJob
from megatron_hexi.cli.output import (
    AsJson,
    Picture,
    PlanOut,
    check_ending,
    check_outputs,
    output_path,
    print_json,
    print_report,
    progress_bar,
    say,
    write_picture,
)
from megatron_hexi.cli.script_start import arguments_of_script
from megatron_hexi.cli.sequence_contents import BatchShares
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import planned_kernels, unit_rates
from megatron_hexi.errors import HexiError, NoFlagError, NothingFitsError
from megatron_hexi.models import job_terms, model_file
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.plan import write_plan
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.report.launch_lines import flags_text
from megatron_hexi.text_file import write_text_atomically

if TYPE_CHECKING:
    from megatron_hexi.planner import FeatureAblation, Planned, Request, WeakKind
    from megatron_hexi.report.launch_lines import LaunchLines

# The planner and matplotlib take a second to import: only what uses them does, and not before its input was
# found to be right.

#: Names of nodes that an error lists.
_MOST_NODES = 4

app = typer.Typer()


@app.command(
    epilog="Example: hexi plan examples/clusters/mixed-16.yaml --model gpt-7b --seq-length 131072 "
    "-o plan.yaml"
)
@with_bundles
def plan(
    cluster: ClusterPath,
    job: NewJob,
    out: PlanOut,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND …",
            help="In place of --model, the command that starts your training, after two dashes: it is run, "
            "up to the start.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show where the next best layouts lose time, and the gain of each feature that Megatron's "
            "flags lack and of kinds of GPU with little of the speed, by planning again without it.",
        ),
    ] = False,
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help="Find the longest sequence that fits in memory, from --seq-length on, and plan that. "
            "Example: hexi plan cluster.yaml --model llama3-8b --seq-length 8192 --longest",
        ),
    ] = False,
    spare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Node of the cluster file that waits as a spare of an elastic job (docs/surviving.md) and "
            "gets no part of the plan; may be repeated.",
            show_default=False,
        ),
    ] = None,
    tried: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.csv",
            help="Write a line for each plan that was timed: the step of the search that made it, layout, "
            "seconds, memory, and why it was not chosen; also where nothing fits. Example: --tried tried.csv",
            parser=output_path,
        ),
    ] = None,
    batch_shares: BatchShares = False,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Find the fastest plan for a job on a cluster.

    Of plans that take at most 1 % longer than the fastest, the one that uses least beyond Megatron's flags is
    written, and the fastest named beside it (see --fastest and --simplest).

    Prints a lower bound on the time of any plan, and the lines that start the training.

    With -- COMMAND it RUNS YOUR SCRIPT, with stand-ins for torchrun, python, srun, mpirun, ray and megatron
    first on PATH, and ends it at its first start of a training, which does not take place (see hexi
    capture). What it would have started is planned; its arguments are written beside the plan.

    Exit code 3 where nothing fits in memory.
    """
    if command:
        job = _job_of_command(command, job, cluster, out)
    check_outputs([cluster, model_file(job.named().model)], [out, tried], picture)
    if tried is not None:
        check_ending(tried, "CSV")
    request, whole = job.request(batch_shares), read_cluster(cluster)
    left_out = _numbers(spare or (), whole)
    machines = whole.without(left_out) if left_out else whole
    if longest:
        from megatron_hexi.planner import longest_request

        with progress_bar() as progress:
            request = longest_request(request, machines, progress)
    planned = _find(request, machines, job, tried)
    gains: Sequence[FeatureAblation] = ()
    weak: Sequence[WeakKind] = ()
    if explain:
        from megatron_hexi.planner import ablate_features, weak_kinds

        with progress_bar() as progress:
            gains = ablate_features(request, machines, planned.plan, progress)
            weak = weak_kinds(request, machines, planned.plan, progress)
    if batch_shares:
        rates = unit_rates(planned.plan, replace(planned.job, documents=None), machines)
        planned = replace(planned, plan=replace(planned.plan, rates=rates))
    written = planned.plan
    if left_out:
        from megatron_hexi.planner import plan_of_whole

        written = plan_of_whole(planned.plan, whole, left_out)
    write_plan(written, out)
    say(f"wrote {out}")
    if picture is not None:
        from megatron_hexi.report.pictures import draw_plan
        from megatron_hexi.report.unit_summary import unit_summaries

        gpus = [rank.device for rank in planned.cost.ranks]
        write_picture(draw_plan(planned.plan, unit_summaries(planned.plan), gpus), picture)
    from megatron_hexi.report.comparison import (
        gains_dict,
        gains_report,
        rivals_dict,
        rivals_report,
        weak_report,
    )
    from megatron_hexi.report.launch_lines import launch_dict, launch_text
    from megatron_hexi.report.planned import job_dict, planned_dict, planned_report

    fitting = None
    if planned.job.documents is None and planned.job.images is None:
        from megatron_hexi.planner import longest_in_layout

        fitting = longest_in_layout(planned.plan, planned.job, machines)
    lines: LaunchLines | None = None
    with _without_flags():
        lines = find_lines(written, whole, out, cluster, job.model, [])
        say_trial(lines.flags, job.model, [])
    if as_json:
        files = {"plan": str(out), "cluster": str(cluster)}
        document = {"job": job_dict(planned.job)} | planned_dict(planned, machines)
        document |= {"longest_sequence": fitting}
        document |= {"next_best": rivals_dict(planned, machines), "launch": lines and launch_dict(lines)}
        if explain:
            document |= {"gains": gains_dict(planned, gains), "weak_kinds": [vars(kind) for kind in weak]}
        print_json(files | document)
    else:
        print_report(planned_report(planned, machines))
        if fitting is not None:
            print(f"longest sequence that fits in this layout: {fitting:,} tokens (--longest: in any layout)")
        print_report(rivals_report(planned, machines, explain=explain))
        if explain:
            print_report(gains_report(planned, gains))
            print_report(weak_report(planned, weak))
        if lines is not None:
            print(launch_text(lines))
            if spare:
                print(f"# spare {', '.join(spare)}: waits in an elastic job only (docs/surviving.md, Spares)")


def _job_of_command(command: Sequence[str], job: NewJob, cluster: Path, out: Path) -> NewJob:
    """Return the job that a command would start, whose arguments are written beside the plan."""
    if job.model:
        raise HexiError(
            f"--model {job.model} beside -- {command[0]}: the command says the model; leave --model out"
        )
    written = out.with_suffix(".args")
    scripts = [Path(word) for word in command if os.path.isfile(word)]
    check_outputs([cluster, *scripts], [out, written], None)
    write_text_atomically(written, flags_text(arguments_of_script(command)))
    say(f"wrote {written}: Megatron's arguments of {shlex.join(command)[:80]}")
    return replace(job, model=str(written))


@contextlib.contextmanager
def _without_flags() -> Iterator[None]:
    """Turn the error that Megatron has no flag for a constant of the model into a note."""
    try:
        yield
    except NoFlagError as problem:
        say(f"note: no lines that start the training: {problem}")


@app.command(
    epilog="Example: hexi compare examples/clusters/mixed-16.yaml --model gpt-7b --seq-length 131072 "
    "--picture compare.png"
)
@with_bundles
def compare(
    cluster: ClusterPath,
    job: NewJob,
    batch_shares: BatchShares = False,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Compare the plan with uniform and other baseline layouts.

    Shows the predicted time of each, or why it does not apply.

    Exit code 3 where nothing fits in memory.
    """
    check_outputs([cluster, model_file(job.named().model)], [], picture)
    request, machines = job.request(batch_shares), read_cluster(cluster)
    planned = _find(request, machines, job, with_baselines=True)
    from megatron_hexi.report import comparison
    from megatron_hexi.report.planned import job_line

    if picture is not None:
        from megatron_hexi.report.comparison_picture import draw_comparison

        title = job_line(planned.job, machines)
        write_picture(draw_comparison(comparison.compare(planned, machines), title), picture)
    if as_json:
        print_json(comparison.comparison_dict(planned, machines))
    else:
        print_report(comparison.comparison_report(planned, machines))


def _numbers(spares: Sequence[str], cluster: Cluster) -> set[int]:
    """Return the numbers of the nodes that are named as spares."""
    numbers: set[int] = set()
    for name in spares:
        found = cluster.file.find_nodes(name)
        if not found:
            names = ", ".join(node.name for node in cluster.nodes[:_MOST_NODES])
            raise HexiError(f"--spare {name}: names no node of {cluster.name} ({names}); give one of these")
        numbers.update(found)
    if len(numbers) == len(cluster.nodes):
        raise HexiError(f"--spare {' --spare '.join(spares)}: leaves no node to train on; give fewer")
    return numbers


def _find(
    request: Request,
    cluster: Cluster,
    job: NewJob,
    tried: Path | None = None,
    *,
    with_baselines: bool = False,
) -> Planned:
    """Return the plan for a request, with its terms written in; `tried` is the table of timed plans."""
    planned_kernels(request.job.kernel, cluster)
    within = job.simpler_within
    from megatron_hexi.planner import find_plan
    from megatron_hexi.report.tried import TriedPlans

    table = TriedPlans(request, cluster)
    try:
        with progress_bar() as progress:
            planned = find_plan(
                *(request, cluster),
                with_baselines=with_baselines,
                simpler_within=within,
                progress=progress,
                tried=None if tried is None else table.note,
            )
    except NothingFitsError:
        _write_tried(tried, table.text(None))
        raise
    _write_tried(tried, table.text(planned))
    left_open = {"model", "seq_length", "tensor_parallel", "data_parallel", "kernel"}
    if kind_of(planned.plan) == "stages":  # which state it
        left_open.add("recompute")
    if planned.job.precision != "fp8":
        left_open.add("fp8_recipe")
    if not planned.job.lora_rank:
        left_open.add("lora_rank")
    if planned.job.model.experts is None:
        left_open.add("expert_imbalance")
    terms = job_terms(
        {field: value for field, value in vars(planned.job).items() if field not in left_open}, planned.plan
    )
    if planned.job.precision != "fp32":  # no kernel that the catalogue knows takes it
        kernels = planned_kernels(planned.job.kernel, cluster)
        gpus = rank_gpus(planned.plan, len(cluster.ranks))
        used = {cluster.ranks[gpu].device.name for gpu in gpus}
        terms = replace(terms, kernel={gpu: kernel for gpu, kernel in kernels.items() if gpu in used})
    return replace(planned, plan=replace(planned.plan, job=terms), notes=(*job.notes, *planned.notes))


def _write_tried(path: Path | None, table: str) -> None:
    """Write the table of timed plans, if it was asked for."""
    if path is not None:
        write_text_atomically(path, table)
        say(f"wrote {path}")
