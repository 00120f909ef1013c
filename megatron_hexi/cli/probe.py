"""``hexi probe``: measures a cluster under torchrun or srun, and writes its cluster file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from megatron_hexi.cli.options import whole
from megatron_hexi.cli.output import (
    AsJson,
    Picture,
    Progress,
    check_outputs,
    output_option,
    print_json,
    print_report,
    progress_bar,
    say,
    write_picture,
)
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import flag_name

if TYPE_CHECKING:
    from megatron_hexi.probe.document import Measurement, Options
    from megatron_hexi.probe.world import World

# The package that measures imports torch, which takes seconds that no other command need spend.

app = typer.Typer()

_WHAT = "What to measure"


def _number(field: str, text: str) -> Any:
    return typer.Option(
        flag_name(field), help=text, metavar="N", parser=whole, rich_help_panel=_WHAT, show_default=False
    )


@app.command(
    epilog="Example: hexi probe -o cluster.yaml; of a cluster: python -m megatron_hexi.torchrun "
    "--nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --no-python hexi probe "
    "-o cluster.yaml"
)
def probe(
    out: Annotated[Path, output_option("CLUSTER.yaml", "Where to write the cluster file.")],
    kernel: Annotated[
        list[str],
        typer.Option(
            help="Attention kernel to measure; may be repeated.", metavar="NAME", rich_help_panel=_WHAT
        ),
    ] = ["auto"],  # noqa: B006 (typer reads it, nobody changes it)
    precision: Annotated[
        str, typer.Option(help="bf16, fp16 or fp32.", metavar="TYPE", rich_help_panel=_WHAT)
    ] = "bf16",
    hidden: Annotated[
        int | None, _number("hidden_size", "Hidden size of the model; default: 4096 on GPUs, 1024 on CPUs.")
    ] = None,
    heads: Annotated[
        int | None, _number("local_heads", "Attention heads of one rank; default: 8 on GPUs, 2 on CPUs.")
    ] = None,
    head_dim: Annotated[int | None, _number("head_dim", "Size of one head; default: 128.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES", help="Time to measure for; default: 10, with --quick 2.", show_default=False
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure at fewer sizes.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an interrupted probe measured.")
    ] = False,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Measure a cluster and write its cluster file.

    Start it as the job, one process for each GPU, with torchrun or srun. Alone it measures one GPU.

    CLUSTER.yaml.partial.json keeps what is measured; the same command resumes from it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch says of lost ranks, we say once
    from megatron_hexi.probe import run as measuring
    from megatron_hexi.probe.world import connect

    with connect() as world, _said_once(world):
        with world.all_or_none():
            options = _options(kernel, precision, hidden, heads, head_dim, budget, quick=quick)
            if world.rank == 0:
                check_outputs([], [out, measuring.partial_path(out)], picture)
        shows_bar = world.rank == 0 and sys.stderr.isatty()
        with progress_bar() if shows_bar else contextlib.nullcontext() as bar:
            measured = measuring.probe(
                world, options, measuring.partial_path(out), restart=restart, progress=_progress(world, bar)
            )
        with world.all_or_none():
            if world.rank == 0:
                _finish(measured, out, picture, as_json=as_json)


def read_words(words: Sequence[str]) -> Path:
    """Return the output path in the words of ``hexi probe``, which are checked as the command does.

    Raises:
        TyperException: it does not take them.
    """
    given = get_command(app).make_context("hexi launch-probe … --", list(words)).params
    names = ("kernel", "precision", "hidden", "heads", "head_dim", "budget")
    _options(*(given[name] for name in names), quick=given["quick"])
    return Path(given["out"])


def _options(
    kernels: Sequence[str],
    precision: str,
    hidden: int | None,
    heads: int | None,
    head_dim: int | None,
    budget_min: float | None,
    *,
    quick: bool,
) -> Options:
    """Return a probe's options, with defaults for those that are not given."""
    from megatron_hexi.probe.document import Options

    return Options(
        kernels=tuple(kernels),
        precision=precision,
        hidden_size=hidden,
        heads=heads,
        head_dim=128 if head_dim is None else head_dim,
        budget_s=60 * ((2 if quick else 10) if budget_min is None else budget_min),
        quick=quick,
    )


def _finish(measured: Measurement, out: Path, picture: Path | None, *, as_json: bool) -> None:
    """Write the cluster file, remove the partial measurement, and print the result."""
    from rich.console import Group
    from rich.text import Text

    from megatron_hexi.probe.assemble import assemble
    from megatron_hexi.probe.network import write_cluster
    from megatron_hexi.probe.run import partial_path
    from megatron_hexi.report.tables import device_report

    data, notes = assemble(measured, out.stem)
    cluster, notes = write_cluster(out, data, notes, measured)
    partial_path(out).unlink(missing_ok=True)
    say(f"wrote {out}")
    devices = list({node.device.name: node.device for node in cluster.nodes}.values())
    if picture is not None:
        from megatron_hexi.report.pictures import draw_curves

        write_picture(draw_curves(devices), picture)
    if as_json:
        print_json(measured.as_dict())
    else:
        print_report(Group(*map(device_report, devices), *(Text(f"note: {note}") for note in notes)))


def _progress(world: World, bar: Progress | None) -> Progress:
    """Return the progress callback of rank 0: a bar on a terminal, else a line for each stage."""
    printed = set[int]()

    def progress(what: str, done: int, total: int) -> None:
        if bar is not None:
            bar(what, done, total)
        elif world.rank == 0 and done not in printed:
            printed.add(done)
            say(f"{done + 1} of {total}: {what}")

    return progress


@contextlib.contextmanager
def _said_once(world: World) -> Iterator[None]:
    """Let one rank print an error that ends all ranks alike.

    Raises:
        HexiError: on the rank that speaks.
        SystemExit: on the others, with the same exit code.
    """
    from megatron_hexi.probe.world import ElsewhereError, LostRankError

    try:
        yield
    except HexiError as problem:
        silent = isinstance(problem, LostRankError) and not world.speaks()
        if silent or isinstance(problem, ElsewhereError):
            raise SystemExit(problem.exit_code) from None
        raise
