"""``hexi doctor``: what is installed, what is wrong, and what to do about it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_hexi.cli.checkout import checkout_is_patched
from megatron_hexi.cli.output import AsJson, print_json, print_report, progress_bar
from megatron_hexi.errors import EXIT_USER_ERROR, HexiError

if TYPE_CHECKING:
    from megatron_hexi.doctor import Checkout

# The package `doctor` imports the half that trains, so it is imported by this command alone, when it runs.

app = typer.Typer()


@app.command(
    epilog="Example: hexi doctor --megatron ~/Megatron-LM; python -m megatron_hexi.torchrun … --no-python "
    "hexi doctor"
)
def doctor(
    as_json: AsJson = False,
    megatron: Annotated[
        Path | None,
        typer.Option(metavar="CHECKOUT", help="Also check a Megatron-LM checkout for the import line."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Look at this process only, under torchrun or srun too.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, max=86400, help="How long to wait for the other ranks of a job."
        ),
    ] = 120,
) -> None:
    """Examine this machine, or all ranks of a job.

    Versions, kernels, patches and network; every problem with its remedy. For a job, start it with torchrun
    or srun. Exit code 2 where a problem is an error; warnings and notes do not count.
    """
    from megatron_hexi.doctor import doctor_dict, doctor_report, examine, launched_job

    job = None if local else launched_job()
    shows_bar = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    with progress_bar() if shows_bar else contextlib.nullcontext() as progress:
        findings = examine(job, _look_at(megatron), timeout, progress)
    if findings.facts:
        if as_json:
            print_json(doctor_dict(findings.facts, findings.problems))
        else:
            print_report(doctor_report(findings.facts, findings.problems))
    if not findings.healthy:
        raise typer.Exit(EXIT_USER_ERROR)


def _look_at(checkout: Path | None) -> Checkout | None:
    from megatron_hexi.doctor import Checkout

    if checkout is None:
        return None
    if not os.path.isdir(checkout):
        raise HexiError(f"--megatron {checkout}: no such folder; give that of a Megatron-LM checkout")
    try:
        return Checkout(str(checkout), "patched" if checkout_is_patched(checkout) else "not patched")
    except HexiError as problem:
        return Checkout(str(checkout), "unknown", str(problem))
