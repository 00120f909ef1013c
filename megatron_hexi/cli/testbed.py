"""``hexi testbed``: a mixed cluster emulated on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_hexi.cli.options import ClusterPath
from megatron_hexi.cli.output import AsJson, print_json, print_report
from megatron_hexi.lab.testbed.command import run_testbed
from megatron_hexi.lab.testbed.truth import testbed_report

commands = typer.Typer(
    help="Emulate a mixed cluster on this machine.",
    epilog="Example: hexi testbed check scripts/testbed/two-fast-two-slow.yaml",
    no_args_is_help=True,
)
app = typer.Typer()
app.add_typer(commands, name="testbed")

SpeedsOption = Annotated[
    str, typer.Option("--speeds", metavar="HOW", help="How ranks are slowed: paced, quota or none.")
]
LinksOption = Annotated[
    str, typer.Option("--emulate-links", metavar="on|off", help="Whether the file's links are emulated.")
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="0,1,…", help="Numbers of the GPUs in the cluster file that ranks stand for; default: all."
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="RUN_DIR", help="A new folder for logs and testbed.json.", show_default=False
    ),
]


@commands.command(
    epilog="Example: hexi testbed run scripts/testbed/two-fast-two-slow.yaml -o run -- "
    "-m megatron_hexi.pretrain_gpt --hexi-plan plan.yaml …"
)
def run(
    cluster: ClusterPath,
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- -m MODULE|SCRIPT …", help="What torchrun would start, after two dashes."),
    ],
    speeds: SpeedsOption = "paced",
    links: LinksOption = "on",
    gpus: Gpus = None,
    throttle: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU=SPEED@BEGIN..END", help="Slow a GPU down between two seconds of the job."),
    ] = None,
    out: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run a job on the emulated cluster.

    The job's exit code is passed on. Exit code 4 where the testbed is off by more than 5 %.
    """
    _run(program, as_json, cluster, out, speeds, links, gpus, throttle or [])


@commands.command(epilog="Example: hexi testbed check scripts/testbed/two-fast-two-slow.yaml")
def check(
    cluster: ClusterPath,
    speeds: SpeedsOption = "paced",
    links: LinksOption = "on",
    gpus: Gpus = None,
    out: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the emulated cluster under a synthetic load.

    Exit code 4 where it is off by more than 5 %.
    """
    _run([], as_json, cluster, out, speeds, links, gpus)


def _run(
    program: list[str],
    as_json: bool,
    path: Path,
    folder: Path | None,
    speeds: str,
    links: str,
    gpus: str | None,
    throttles: list[str] | None = None,
) -> None:
    code, measurements = run_testbed(
        path,
        folder=folder,
        speeds=speeds,
        links=links,
        gpus=gpus,
        program=program,
        quiet=as_json,
        throttles=throttles or (),
    )
    if code == 0 and measurements is not None:
        _show(measurements, as_json)
    sys.exit(code)


def _show(measurements: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(measurements)
    else:
        print_report(testbed_report(measurements))
