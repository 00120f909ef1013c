"""``hexi recipe``: jobs by name, which ``--model`` takes everywhere."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from megatron_hexi.cli.output import AsJson, check_outputs, output_option, print_json, print_report, say
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Recipe, recipes
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()
recipe = typer.Typer(
    help="List named long-context jobs, or write one to a file.",
    epilog="Example: hexi recipe list",
    no_args_is_help=True,
)
app.add_typer(recipe, name="recipe")

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="One that hexi recipe list names.")]


@recipe.command(name="list", epilog="Example: hexi recipe list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes."""
    if as_json:
        print_json({"recipes": [_as_dict(row) for row in recipes().values()]})
        return
    table = Table()
    for name in ("recipe", "model", "tokens", "batch", "learning rate", "iterations", "tokenizer"):
        table.add_column(name, no_wrap=True)
    for row in recipes().values():
        numbers = f"{row.seq_length:,}", f"{row.global_batch_size}", f"{row.lr:g}", f"{row.iterations:,}"
        table.add_row(row.name, row.model, *numbers, row.tokenizer)
    print_report(table)


@recipe.command(epilog="Example: hexi recipe show llama3-8b-128k")
def show(name: Name, as_json: AsJson = False) -> None:
    """Print a recipe: Megatron's arguments, and what they are taken from."""
    chosen = _find(name)
    if as_json:
        print_json(_as_dict(chosen))
    else:
        print(chosen.text, end="")


@recipe.command(epilog="Example: hexi recipe write llama3-8b-128k -o job.args")
def write(
    name: Name,
    out: Annotated[Path, output_option("JOB.args", "Where to write it.")],
    as_json: AsJson = False,
) -> None:
    """Write a recipe to a file, to change it there; --model takes that file too."""
    chosen = _find(name)
    check_outputs([], [out], None, "text")
    write_text_atomically(out, chosen.text)
    say(f"wrote {out}")
    if as_json:
        print_json({"path": str(out)} | _as_dict(chosen))


def _find(name: str) -> Recipe:
    found = recipes().get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), recipes(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see hexi recipe list"
        raise HexiError(f"{name[:64]!r} is no recipe; {hint}")
    return found


def _as_dict(item: Recipe) -> dict[str, Any]:
    return dataclasses.asdict(item) | {"flags": dict(item.flags), "sources": list(item.sources)}
