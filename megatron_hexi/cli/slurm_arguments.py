"""``hexi slurm-arguments``: the arguments that a Slurm job gives each rank of a training run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.argument_file import located_words
from megatron_hexi.cli.options import whole
from megatron_hexi.cli.output import check_outputs, output_option, say, tell
from megatron_hexi.errors import HexiError
from megatron_hexi.models.megatron_arguments import read_arguments
from megatron_hexi.plan import read_plan
from megatron_hexi.shell.script import MAX_BYTES
from megatron_hexi.slurm import plan_start
from megatron_hexi.text_file import read_text, write_text_atomically
from megatron_hexi.whole_number import variable_number

app = typer.Typer()


@app.command(
    epilog="Example: hexi slurm-arguments job.args --plan plan.yaml --checkpoints checkpoints -o words"
)
def slurm_arguments(
    file: Annotated[
        Path, typer.Argument(metavar="JOB.args", help="Megatron's arguments, as the user has them.")
    ],
    plan: Annotated[str, typer.Option(metavar="PLAN.yaml", help="The plan that ranks are placed by.")],
    checkpoints: Annotated[str, typer.Option(metavar="FOLDER", help="Where to save without --save.")],
    out: Annotated[Path, output_option("WORDS", "Where to write the words.")],
    save_interval: Annotated[
        int, typer.Option(metavar="N", help="Iterations from checkpoint to checkpoint.", parser=whole)
    ] = 500,
) -> None:
    """Complete Megatron's arguments for a Slurm job.

    Keeps the file's --save, --load, --save-interval and --ckpt-format; without them training saves in
    FOLDER and resumes from there. Writes WORDS, each ended by a NUL byte, as mapfile -d '' reads them.
    """
    check_outputs([file], [out], None, "text")
    again = variable_number(os.environ, "SLURM_RESTART_COUNT", 0) > 0
    if save_interval < 1:
        raise HexiError(f"--save-interval {save_interval}: give a number of iterations above 0")
    if os.path.exists(checkpoints) and not os.path.isdir(checkpoints):
        raise HexiError(f"--checkpoints {checkpoints}: is no folder; give one, which need not be there yet")
    text = read_text(file, MAX_BYTES)
    located = located_words(text, file)
    read_arguments(located, file, read_plan(plan))
    words = [word.text for word in located]
    start = plan_start(
        words, file, plan=plan, checkpoints=checkpoints, save_interval=save_interval, again=again
    )
    write_text_atomically(out, "".join(f"{word}\0" for word in start.words))
    tell(f"saves in {start.save}; goes on from {start.load}")
    say(f"wrote {out}")
