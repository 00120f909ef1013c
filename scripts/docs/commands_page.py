"""The page of the command `hexi`: every subcommand, option, default and example, from the Typer app."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from megatron_hexi.cli.main import app
from megatron_hexi.errors import EXIT_NO_PLAN, EXIT_USER_ERROR
from megatron_hexi.lab.testbed.lab import UntrueError
from scripts.docs.markdown import GENERATED_FROM, code, definitions, one_line, paragraphs, slug

_HEAD = f"""\
# The command `hexi`

{GENERATED_FROM.format(source="the Typer app in megatron_hexi/cli")}

`hexi COMMAND --help` shows the same in a terminal; `hexi --version` prints the version. Documents asked for
with `--json` go to standard output, everything said besides to standard error. Bold options are
required; below each command's usage is an example.

## Exit codes

"""

_EXIT_CODES = (
    ("0", "done"),
    ("1", "a bug: a traceback; report it"),
    (
        str(EXIT_USER_ERROR),
        "the input is wrong, or `hexi doctor` found an error: one line with place and remedy",
    ),
    (
        str(EXIT_NO_PLAN),
        "no plan fits in memory: one line with what is short, and changes that were planned and fit",
    ),
    (str(UntrueError.exit_code), "`hexi testbed` was measured to be off by more than it may be"),
    ("130", "interrupted"),
)


class _Row(NamedTuple):
    """An option, bold if required; the flag of its opposite; its value; its meaning, with its default."""

    name: str
    opposite: str
    value: str
    meaning: str


def commands_page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD, definitions(_EXIT_CODES)]
    told: dict[_Row, str] = {}  # in the order of commands
    for name, command in commands():
        parts.append(f"\n## {name}\n\n{paragraphs(command.help)}\n")
        parts.append(f"\n```\n{_usage(name, command)}\n{_example(command.epilog)}\n```\n")
        parts.append(_options(name, [_row(parameter) for parameter in command.params], told))
    return "".join(parts)


def _options(name: str, rows: list[_Row], told: dict[_Row, str]) -> str:
    """The options of a command; those that an earlier one has too by a link to it.

    Args:
        name: of the command.
        rows: of its options.
        told: the command that tells of a row, of those so far; this one's are added.
    """
    own: list[tuple[str, str]] = []
    shared: dict[str, list[str]] = {}
    for row in rows:
        if row in told:
            shared.setdefault(told[row], []).append(row.name)
        else:
            told[row] = name
            own.append((row.name + row.opposite + row.value, row.meaning))
    text = f"\n{definitions(own)}" if own else ""
    for other, options in shared.items():
        text += f"\nAs for [`{other}`](#{slug(other)}): {', '.join(options)}.\n"
    return text


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with all of its words: ``hexi testbed run``."""

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        for word, one in (inner or {}).items():
            yield from below(f"{name} {word}", one)

    return below("hexi", typer.main.get_command(app))


def _usage(name: str, command: Any) -> str:
    needed = [_needed(parameter) for parameter in command.params if parameter.required]
    return " ".join([name, "[options]", *needed])


def _needed(parameter: Any) -> str:
    if parameter.opts[0].startswith("-"):
        return f"{parameter.opts[0]} {parameter.metavar}"
    return str(parameter.metavar)


def _row(parameter: Any) -> _Row:
    is_option = parameter.opts[0].startswith("-")
    name = ", ".join(map(code, parameter.opts)) if is_option else code(parameter.metavar)
    opposite = "".join(f", {code(flag)}" for flag in parameter.secondary_opts)
    flag = getattr(parameter, "is_flag", False)
    value = "" if flag or not is_option else f" {code(parameter.metavar or parameter.name.upper())}"
    name = f"**{name}**" if parameter.required else name
    return _Row(name, opposite, value, one_line(parameter.help) + _default(parameter, flag=flag))


def _default(parameter: Any, *, flag: bool) -> str:
    if parameter.required or flag or parameter.default is None:
        return ""
    values = parameter.default if isinstance(parameter.default, (list, tuple)) else [parameter.default]
    return f" Default {', '.join(code(str(value)) for value in values)}."


def _example(epilog: str) -> str:
    before, _, example = epilog.partition("Example: ")
    if before or not example:
        raise SystemExit(f"a command's epilog is {epilog!r}; begin it with 'Example: '")
    return example
