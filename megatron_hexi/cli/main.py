"""The command `hexi`: its subcommands and its exit codes.

0 done, 2 the user's input is wrong, 3 no plan fits in memory, 4 the testbed was measured to be off (each one
line on standard error), 130 interrupted, 1 our fault (a traceback). `hexi testbed run` passes on its job's.
Documents asked for with ``--json`` go to standard output, everything said besides to standard error.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

import megatron_hexi
from megatron_hexi.cli import (
    checkout,
    devices,
    doctor,
    kubernetes,
    launch,
    place,
    planning,
    plans,
    probe,
    recipe,
    report,
    script_start,
    simulation,
    testbed,
)
from megatron_hexi.cli.output import print_json
from megatron_hexi.errors import HexiError, NothingFitsError, user_errors
from megatron_hexi.standard_output import standard_output

app = typer.Typer(
    help="Long-context training on mixed GPU clusters, as a plugin for Megatron-LM. Options have Megatron's "
    "names.",
    rich_markup_mode=None,  # the tables of the other mode cut long names off
    pretty_exceptions_enable=False,  # our faults keep a traceback that can be pasted into an issue
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _commands in (
    planning,
    simulation,
    launch,
    kubernetes,
    plans,
    devices,
    checkout,
    doctor,
    probe,
    place,
    script_start,
    recipe,
    report,
    testbed,
):
    app.add_typer(_commands.app)


def main() -> None:
    """Run the command line and exit.

    Raises:
        SystemExit: always, with the exit code.
    """
    with user_errors(), standard_output():
        try:
            _refuse_empty(sys.argv[1:])
            code = get_command(app).main(prog_name="hexi", standalone_mode=False)
        except typer.TyperException as problem:  # an unknown option, a missing argument
            message = " ".join(problem.format_message().split()).rstrip(".")
            context = getattr(problem, "ctx", None)
            error = HexiError(f"{message}; see {context.command_path if context else 'hexi'} --help")
            _print_error(error)
            raise error from None
        except HexiError as problem:
            _print_error(problem)
            raise
    sys.exit(code)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse empty words, also after an option's ``=``: a shell variable that is not set leaves them."""
    for before, word in itertools.pairwise(("hexi", *itertools.takewhile(lambda word: word != "--", words))):
        if not word or (word.startswith("--") and word.endswith("=")):
            raise HexiError(f"{before} {word!r}: is empty (is a variable not set?); give a value")


def _print_error(problem: HexiError) -> None:
    """Print an error; with ``--json`` as a document too, unless `hexi validate` has printed its own."""
    words = sys.argv[1:]
    own_words = words[: words.index("--")] if "--" in words else words
    if "--json" in own_words and own_words[0] != "validate" and os.environ.get("RANK", "0") == "0":
        details = problem.details if isinstance(problem, NothingFitsError) else {}
        print_json({"error": str(problem), "exit_code": problem.exit_code, **details})


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


if __name__ == "__main__":
    main()
