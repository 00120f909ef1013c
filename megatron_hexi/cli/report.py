"""``hexi report``: a run that wrote a record, beside what was predicted of it, as one HTML page."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.cli.options import MODEL_OF_REPORT, PlanPath
from megatron_hexi.cli.output import (
    AsJson,
    check_outputs,
    output_option,
    print_json,
    print_report,
    progress_bar,
    say,
)
from megatron_hexi.cli.planned_job import PlannedJob, estimate_on
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.plan import Plan, read_plan
from megatron_hexi.record import Start, read_record
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()


@app.command(
    epilog="Example: hexi report plan.yaml --record record.jsonl --cluster cluster.yaml -o report.html",
)
def report(
    plan: PlanPath,
    record: Annotated[
        Path, typer.Option(metavar="RECORD.jsonl", help="What the run wrote for --hexi-record.")
    ],
    out: Annotated[Path, output_option("OUT.html", "Where to write the page.")],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="CLUSTER.yaml", help="Cluster of the run: adds predictions and a simulated iteration."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help=MODEL_OF_REPORT),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report of a run and its prediction.

    The plan, each rank's time and memory, the losses. The page needs no network; its figures are printed too.
    """
    planned, run_record = read_plan(plan), read_record(record)
    model_file = PlannedJob(model=model).model_file(planned)
    check_outputs([plan, record, cluster, model_file], [out], None, "HTML")
    from megatron_hexi.report.run_summary import describe_run, last_start

    start = last_start(run_record, planned)
    if cluster is None and model is not None:
        raise HexiError(f"--model {model} without --cluster; add --cluster CLUSTER.yaml")
    machines = None if cluster is None else read_cluster(cluster)
    job = None if cluster is None else _job(start, planned, plan, model)
    cost = estimate_on(planned, plan, job, machines, cluster) if job and machines and cluster else None
    run = describe_run(run_record, planned, cost)
    # Bring matplotlib: not before the input was found to be right.
    from megatron_hexi.lab import simulator
    from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
    from megatron_hexi.report.run_page import run_page
    from megatron_hexi.report.run_summary import run_report

    timeline, simulated_s = None, None
    if job and machines:
        with progress_bar() as progress:
            replaying = partial(progress, "replaying")
            simulation = simulator.simulate(planned, job, machines, progress=replaying)
        timeline, simulated_s = draw_timeline(simulation, planned), simulation.iteration_s
    page = run_page(run, planned, _title(plan, job, machines), cost, timeline, simulated_s)
    write_text_atomically(out, page, private=True)  # it names hosts and losses
    say(f"wrote {out}")
    if as_json:
        print_json({"plan": str(plan), "record": str(record)} | asdict(run))
    else:
        print_report(run_report(run))


def _job(start: Start, plan: Plan, path: Path, model: str | None) -> Job:
    """Return the job as it was recorded."""
    names = ["micro_batch_size", "global_batch_size", "precision"]
    if kind_of(plan) != "stages":  # with stages, arguments differ between ranks, and the plan states them
        names += ["pipeline_parallel", "virtual_stages", "recompute"]
        names += ["distributed_optimizer", "overlap_gradients", "sequence_parallel"]
    # What the plan states was set by it, and may say more: so many layers that are recomputed.
    recorded = {name: getattr(start, name) for name in names if getattr(plan.job, name) is None}
    return PlannedJob(model=model, **recorded).job(plan, path)


def _title(path: Path, job: Job | None, cluster: Cluster | None) -> str:
    if job is None or cluster is None:
        return f"Run of {path.name}"
    return f"Run of {job.model.name} on {cluster.name}"
