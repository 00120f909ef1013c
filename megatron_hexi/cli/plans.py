"""``hexi show``, ``hexi validate`` and ``hexi proportion``: plan files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_hexi.cli.bundles import with_bundles
from megatron_hexi.cli.options import PlanPath, check_limits, count_option
from megatron_hexi.cli.output import (
    AsJson,
    Picture,
    PlanOut,
    check_outputs,
    print_json,
    print_report,
    say,
    tell,
    write_picture,
)
from megatron_hexi.cli.planned_job import PlannedJob, estimate_on
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import find_shortage, planned_kernels
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import (
    Workload,
    check_speeds,
    plan_dict,
    plan_digest,
    proportional_plan,
    read_plan,
    write_plan,
)
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.report.estimate import estimate_dict, estimate_report
from megatron_hexi.report.tables import plan_report
from megatron_hexi.report.unit_summary import unit_summaries

#: As many as a cluster file may have GPUs.
_MOST_RANKS = 2**16

app = typer.Typer()


def _number(field: str, text: str) -> Any:
    return count_option(field, text, panel=None)


@app.command(epilog="Example: hexi show plan.yaml --picture plan.png")
def show(plan: PlanPath, as_json: AsJson = False, picture: Picture = None) -> None:
    """Show what each rank of a plan holds and sends.

    Tokens, heads, positions, bytes, and the planner's prediction.
    """
    check_outputs([plan], [], picture)
    shown_plan = read_plan(plan)
    rows = unit_summaries(shown_plan)
    if picture is not None:
        # Takes a second to import, which the other commands need not spend.
        from megatron_hexi.report.pictures import draw_plan

        write_picture(draw_plan(shown_plan, rows), picture)
    if as_json:
        print_json(
            {
                "plan": plan_dict(shown_plan),
                "digest": plan_digest(shown_plan),
                "ranks": [dataclasses.asdict(row) for row in rows],
            }
        )
    else:
        print_report(plan_report(shown_plan, rows))


@app.command(epilog="Example: hexi validate plan.yaml --cluster cluster.yaml --model gpt-7b")
@with_bundles
def validate(
    plan: PlanPath,
    job: PlannedJob,
    as_json: AsJson = False,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="CLUSTER.yaml", help="Predict time and memory on this cluster, and check both."),
    ] = None,
) -> None:
    """Check a plan; given a cluster, predict time and memory.

    Exit code 2 with file and line where a rule is broken, or where the plan does not fit in memory.
    """
    document: dict[str, Any] = {"plan": str(plan), "valid": False}
    try:
        checked = read_plan(plan)
        document |= {"valid": True, "ranks": checked.ranks, "digest": plan_digest(checked)}
        if cluster is None and job.model is not None:
            raise HexiError(f"--model {job.model} without --cluster; add --cluster CLUSTER.yaml")
        if not as_json:
            tell(f"{plan}: a valid plan for {checked.ranks} ranks")
        if cluster is not None:
            machines = read_cluster(cluster)
            planned_kernels(job.kernel, machines)
            checked_job = job.job(checked, plan)
            cost = estimate_on(checked, plan, checked_job, machines, cluster)
            document |= {"cluster": str(cluster), "estimate": estimate_dict(cost, checked_job)}
            if not as_json:
                print_report(estimate_report(cost))
            if shortage := find_shortage(cost):
                raise HexiError(f"{plan}: does not fit: {shortage}")
    except HexiError as problem:
        if as_json:
            print_json(document | {"valid": False, "error": str(problem)})
        raise
    if as_json:
        print_json(document)


@app.command(
    epilog="Example: hexi proportion --speeds 4,3,2/3 --seq-length 1021 "
    "--num-attention-heads 8 --num-query-groups 4 --kv-channels 16 "
    "-o plan.yaml"
)
def proportion(
    speeds: Annotated[
        list[str],
        typer.Option(
            metavar="SPEEDS",
            help="Relative speeds of a replica's ranks, in rank order: commas between a group's members, "
            "slashes between groups. Once for each data-parallel replica.",
        ),
    ],
    seq_length: Annotated[int, _number("seq_length", "Tokens of one sequence.")],
    heads: Annotated[int, _number("heads", "Query heads of a layer.")],
    head_dim: Annotated[int, _number("head_dim", "Size of one head.")],
    out: PlanOut,
    kv_heads: Annotated[
        int | None, _number("kv_heads", "KV heads of a layer; as many as query heads if not given.")
    ] = None,
    tensor_parallel: Annotated[int, _number("tensor_parallel", "Ranks of a tensor-parallel group.")] = 1,
    value_dim: Annotated[
        int | None, _number("value_dim", "Size of one head's values, if it differs (multi-latent attention).")
    ] = None,
    prefetch_steps: Annotated[
        int, _number("prefetch_steps", "Steps by which keys and values are sent ahead.")
    ] = 1,
) -> None:
    """Write a plan in proportion to the ranks' speeds."""
    check_outputs([], [out], None)
    check_limits({"seq_length": seq_length, "heads": heads, "tensor_parallel": tensor_parallel})
    if tensor_parallel < 1:
        raise HexiError(f"{spell_flag('tensor_parallel', tensor_parallel)}: give a number above 0")
    replicas = [parse_speeds(text) for text in speeds]
    ranks = tensor_parallel * sum(len(group) for replica in replicas for group in replica)
    if ranks > _MOST_RANKS:
        raise HexiError(f"--speeds: are those of {ranks} ranks; the most is {_MOST_RANKS}")
    workload = Workload(
        *(seq_length, heads, heads if kv_heads is None else kv_heads, head_dim),
        tensor_parallel=tensor_parallel,
        value_dim=value_dim,
    )
    write_plan(proportional_plan(workload, replicas, prefetch_steps), out)
    say(f"wrote {out}")


def parse_speeds(text: str) -> list[list[float]]:
    """Parse ``"4,3,2/3"`` into ``[[4, 3, 2], [3]]``: the speeds of each group's ranks."""
    try:
        if not text.isascii():  # `float` takes digits of any alphabet
            raise ValueError
        speeds = [[float(speed) for speed in group.split(",")] for group in text.split("/")]
    except ValueError:
        raise HexiError(
            f"--speeds {text}: not numbers; write one a rank, with commas inside a group and slashes between "
            "groups, for example 4,3,2/3"
        ) from None
    check_speeds(speeds, f"--speeds {text}")
    return speeds
