"""``hexi simulate``: predict a plan event by event, and through a changing cluster."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_hexi.cli.bundles import with_bundles
from megatron_hexi.cli.options import ClusterOption, NewJob, PlanPath
from megatron_hexi.cli.output import (
    AsJson,
    Picture,
    check_outputs,
    output_path,
    print_json,
    print_report,
    progress_bar,
    say,
    write_picture,
)
from megatron_hexi.cli.planned_job import PlannedJob, estimate_on
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import find_shortage, planned_kernels
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan, read_plan
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()


@app.command(
    epilog="Example: hexi simulate plan.yaml --cluster examples/clusters/mixed-16.yaml --scenario "
    "examples/scenarios/throttled-gpu.yaml --picture scenario.png"
)
@with_bundles
def simulate(
    plan: PlanPath,
    cluster: ClusterOption,
    job: PlannedJob,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json",
            help="Write every event, for ui.perfetto.dev or chrome://tracing.",
            parser=output_path,
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="SCENARIO.yaml",
            help="Simulate hours or days of throttled GPUs, congested links and node failures: goodput "
            "of the plan kept, re-planned, and of the best plan at every time.",
        ),
    ] = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Simulate a plan event by event on shared links.

    Compares with the cost model. With --scenario, simulates a changing cluster instead.
    """
    if scenario is not None and trace is not None:
        raise HexiError(f"--trace {trace}: shows one iteration, --scenario plays many; leave out one")
    replayed = read_plan(plan)
    check_outputs([plan, cluster, scenario, job.model_file(replayed)], [trace], picture, "JSON")
    machines = read_cluster(cluster)
    planned_kernels(job.kernel, machines)
    simulated_job = job.job(replayed, plan)
    cost = estimate_on(replayed, plan, simulated_job, machines, cluster)
    shortage = find_shortage(cost)
    if shortage is not None:
        say(f"note: {plan} does not fit in memory: {shortage}")
    files = {"plan": str(plan), "cluster": str(cluster), "fits": shortage is None}
    if scenario is not None:
        _play(scenario, replayed, simulated_job, job, machines, files if as_json else None, picture)
        return
    from megatron_hexi.lab import simulator
    from megatron_hexi.lab.simulator.timeline import timeline_dict, timeline_report

    with progress_bar() as progress:
        replaying = partial(progress, "replaying")
        simulation = simulator.simulate(replayed, simulated_job, machines, progress=replaying)
    differences = simulator.compare_with_model(simulation, cost)
    drawn = None
    if simulated_job.documents is not None:
        drawn = simulator.draw_documents(replayed, simulated_job, machines)
    if trace is not None:
        write_text_atomically(trace, json.dumps(simulator.chrome_trace(simulation), allow_nan=False))
        say(f"wrote {trace}")
    if picture is not None:
        from megatron_hexi.lab.simulator.timeline_picture import draw_timeline

        write_picture(draw_timeline(simulation, replayed), picture)
    if as_json:
        print_json(files | timeline_dict(simulation, cost, differences, drawn))
    else:
        print_report(timeline_report(simulation, cost, differences, drawn))


def _play(
    path: Path,
    plan: Plan,
    simulated_job: Job,
    stated: PlannedJob,
    machines: Cluster,
    files: dict[str, Any] | None,
    picture: Path | None,
) -> None:
    """Simulate a scenario and print the result; `files` begin the document of ``--json``."""
    from megatron_hexi.lab.scenario import play_scenario, read_scenario
    from megatron_hexi.lab.scenario.scenario_report import scenario_dict, scenario_report
    from megatron_hexi.planner import CHOSEN, Request

    scenario, events = read_scenario(path, machines)
    fixed = frozenset(name for name in CHOSEN if getattr(stated, name, None) is not None)
    request = Request(simulated_job, fixed, NewJob.memory_margin / 100)
    with progress_bar() as progress:
        played = play_scenario(
            *(scenario, events, plan, simulated_job, request, machines),
            progress=partial(progress, "playing"),
        )
    if picture is not None:
        from megatron_hexi.lab.scenario.scenario_picture import draw_scenario

        write_picture(draw_scenario(played), picture)
    if files is not None:
        print_json(files | {"scenario": str(path)} | scenario_dict(played))
    else:
        print_report(scenario_report(played))
