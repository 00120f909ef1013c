"""``hexi capture``: Megatron's arguments from a launch script, which runs up to the start of the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.cli.output import check_outputs, output_option, say
from megatron_hexi.cli.script_start import arguments_of_script
from megatron_hexi.report.launch_lines import flags_text
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()


@app.command(epilog="Example: hexi capture -o job.args -- bash train.sh")
def capture(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND …", help="The command that starts your training.")
    ],
    out: Annotated[Path, output_option("JOB.args", "Where to write the arguments.")],
) -> None:
    """Write the Megatron arguments that a launch script uses.

    They are what --model takes. Runs the command with stand-ins for torchrun, python, srun, mpirun, ray and
    megatron first on PATH, and ends it at its first training run, which does not take place. What
    comes before is done, but for pkill, killall and ssh. A program that it calls by an absolute path is not
    stood in for, and starts.
    """
    check_outputs([Path(word) for word in command if os.path.isfile(word)], [out], None, "text")
    write_text_atomically(out, flags_text(arguments_of_script(command)))
    say(f"wrote {out}")
