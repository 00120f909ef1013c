"""The command `hexi`: its subcommands and its exit codes.

0 done, 2 the user's input is wrong (one line on standard error), 1 our fault (a traceback). Documents
asked for with ``--json`` go to standard output, everything said besides to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

import megatron_hexi
from megatron_hexi.cli.checkout import patch_checkout, unpatch_checkout
from megatron_hexi.cluster import catalog as known_devices
from megatron_hexi.cluster import device as known_device
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import PRECISIONS, RECOMPUTES, estimate, find_shortage, job_of_plan, read_model
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.plan import (
    Plan,
    Workload,
    plan_dict,
    plan_digest,
    proportional_plan,
    read_plan,
    write_plan,
)
from megatron_hexi.report.catalog import catalog_table, device_dict, device_report
from megatron_hexi.report.estimate import estimate_dict, estimate_report
from megatron_hexi.report.holdings import holdings
from megatron_hexi.report.tables import plan_report

# Wide enough for a line a rank when the output goes to a file or a pipe.
_PIPE_WIDTH = 160

app = typer.Typer(
    help="Long-context training on mixed GPU clusters, as a plugin for Megatron-LM.",
    add_completion=False,
    pretty_exceptions_enable=False,  # our faults keep a traceback that can be pasted into an issue
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkout = Annotated[
    Path, typer.Argument(metavar="CHECKOUT", help="Folder of a Megatron-LM checkout, with pretrain_gpt.py.")
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Picture = Annotated[
    Path | None, typer.Option(metavar="OUT.png", help="Draw a picture too (.png, .svg, .pdf, …).")
]


def main() -> None:
    """Run the command line and exit.

    Raises:
        SystemExit: always, with the exit code.
    """
    with user_errors():
        try:
            code = app(prog_name="hexi", standalone_mode=False)
        except typer.TyperException as problem:  # an unknown option, a missing argument
            raise HexiError(f"{problem.format_message().rstrip('.')}; see hexi --help") from None
    sys.exit(code)


@app.callback(invoke_without_command=True)
def hexi(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Long-context training on mixed GPU clusters, as a plugin for Megatron-LM."""
    if version:
        print(f"megatron-hexi {megatron_hexi.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="Example: hexi patch ~/Megatron-LM")
def patch(checkout: Checkout) -> None:
    """Add our one import line to the training scripts of a Megatron-LM checkout."""
    for path in patch_checkout(checkout):
        _say(f"patched {path}")


@app.command(epilog="Example: hexi unpatch ~/Megatron-LM")
def unpatch(checkout: Checkout) -> None:
    """Take that line out again: every file is its original, byte for byte."""
    for path in unpatch_checkout(checkout):
        _say(f"restored {path}")


@app.command(epilog="Example: hexi validate plan.yaml --cluster cluster.yaml --model gpt-7b")
def validate(
    plan: PlanPath,
    as_json: AsJson = False,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="CLUSTER.yaml", help="Predict time and memory on this cluster, and check both."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A preset, a Hugging Face config.json, or a file of Megatron's arguments; the one that the "
            "plan names if not given.",
        ),
    ] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences that pass at once.")] = 1,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of an iteration; what the plan says, or 8.")
    ] = None,
    pipeline_parallel: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    recompute: Annotated[str, typer.Option(help=f"What is recomputed: {', '.join(RECOMPUTES)}.")] = "none",
    precision: Annotated[str, typer.Option(help=f"Of weights: {', '.join(PRECISIONS)}.")] = "bf16",
) -> None:
    """Check every rule that a plan must keep; exit code 2 and the place where one is broken.

    With a cluster, also predict iteration time and memory; exit code 2 where it does not fit.
    """
    document: dict[str, Any] = {"plan": str(plan), "valid": False}
    try:
        checked = read_plan(plan)
        document |= {"valid": True, "ranks": checked.ranks, "digest": plan_digest(checked)}
        if cluster is None and model is not None:
            raise HexiError(f"--model {model} without --cluster; add --cluster CLUSTER.yaml")
        if not as_json:
            print(f"{plan}: a valid plan for {checked.ranks} ranks")
        if cluster is not None:
            job = job_of_plan(
                checked,
                read_model(_model_of(plan, checked, model)),
                micro_batch_size=micro_batch_size,
                global_batch_size=global_batch_size,
                pipeline_parallel=pipeline_parallel,
                recompute=recompute,
                precision=precision,
            )
            cost = estimate(checked, job, read_cluster(cluster))
            document |= {"cluster": str(cluster), "estimate": estimate_dict(cost, job)}
            if not as_json:
                _print_report(estimate_report(cost))
            if shortage := find_shortage(cost):
                raise HexiError(f"{plan}: does not fit: {shortage}")
    except HexiError as problem:
        if as_json:
            _print_json(document | {"valid": False, "error": str(problem)})
        raise
    if as_json:
        _print_json(document)


def _model_of(path: Path, plan: Plan, given: str | None) -> str:
    named = plan.provenance.model if plan.provenance else None
    if given is None and named is None:
        raise HexiError(
            f"{path}: does not say which model it is for (provenance.model); add --model NAME|PATH"
        )
    return given or named or ""


@app.command(epilog="Example: hexi show plan.yaml --picture plan.png")
def show(
    plan: PlanPath,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Show who holds what: tokens, heads, positions, and the bytes that each rank sends."""
    shown = read_plan(plan)
    rows = holdings(shown)
    if picture is not None:
        # Takes a second to import, which the other commands need not spend.
        from megatron_hexi.report.pictures import draw_plan, save_picture

        save_picture(draw_plan(shown, rows), picture)
        _say(f"drew {picture}")
    if as_json:
        _print_json(
            {
                "plan": plan_dict(shown),
                "digest": plan_digest(shown),
                "ranks": [dataclasses.asdict(row) for row in rows],
            }
        )
    else:
        _print_report(plan_report(shown, rows))


@app.command(epilog="Example: hexi catalog H100-SXM-80GB --picture h100.png")
def catalog(
    gpu: Annotated[str | None, typer.Argument(metavar="[GPU]", help="Show this GPU's curves.")] = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Show the GPUs that are known: memory, links, achieved rates, and where each figure comes from."""
    devices = list(known_devices().values()) if gpu is None else [known_device(gpu)]
    if picture is not None:
        from megatron_hexi.report.curves import draw_curves
        from megatron_hexi.report.pictures import save_picture

        save_picture(draw_curves(devices), picture)
        _say(f"drew {picture}")
    if as_json:
        _print_json({"devices": [device_dict(device) for device in devices]})
    else:
        _print_report(catalog_table(devices) if gpu is None else device_report(devices[0]))


@app.command(
    epilog="Example: hexi proportion --speeds 4,3,2/3 --seq-length 1021 --heads 8 --kv-heads 4 --head-dim 16 "
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
    seq_length: Annotated[int, typer.Option(help="Tokens of one sequence.")],
    heads: Annotated[int, typer.Option(help="Query heads of a layer.")],
    head_dim: Annotated[int, typer.Option(help="Size of one head.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PLAN.yaml", help="Where to write the plan.")],
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of a layer; as many as query heads if not given.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each weight.")] = 1,
    window: Annotated[int, typer.Option(help="KV blocks in flight ahead of the one in use.")] = 1,
) -> None:
    """Write the plain plan: tokens and heads in proportion to the ranks' speeds."""
    workload = Workload(seq_length, heads, kv_heads or heads, head_dim, tensor_parallel=tensor_parallel)
    write_plan(proportional_plan(workload, [parse_speeds(text) for text in speeds], window), out)
    _say(f"wrote {out}")


def parse_speeds(text: str) -> list[list[float]]:
    """``"4,3,2/3"`` as ``[[4, 3, 2], [3]]``.

    Raises:
        HexiError: a part is not a number.
    """
    try:
        return [[float(speed) for speed in group.split(",")] for group in text.split("/")]
    except ValueError:
        raise HexiError(
            f"--speeds {text}: not numbers; write one a rank, with commas inside a group and slashes between "
            "groups, for example 4,3,2/3"
        ) from None


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _print_report(report: RenderableType) -> None:
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(report)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
