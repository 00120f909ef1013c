"""Files that are no list of Megatron's arguments: scripts, and those that cannot be read."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_hexi.errors import HexiError

#: A line of YAML: a key that is a flag, or a key with nothing behind it.
_YAML = re.compile(r"^\s*(?:---\s*$|-?-?[A-Za-z_][\w-]*:(?:\s|$))", re.MULTILINE)
_PYTHON = re.compile(r"^(?:import|from)[ \t]+[A-Za-z_][\w.]*(?:[ \t]+import\b|[ \t]*$)", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s)--\w[\w-]*(?=[\s=]|$)")
#: A command of a launch script that starts a training, or a variable, outside a comment.
_SCRIPT = re.compile(
    r"\A#!|^[^#\n]*?(?<![\w/.-])(?:torchrun|srun|mpirun|mpiexec|python3?|source)[ \t]"
    r"|^[ \t]*(?:export )?[A-Za-z_]\w*\+?="
    r"|^[ \t]*(?:ray job submit|megatron (?:sft|pt|rlhf))\b",
    re.MULTILINE,
)
#: A configuration of NeMo-RL, whose training loop knows no plan.
_NEMO_RL = re.compile(r"^[ \t]+megatron_cfg:|\brun_grpo\w*\.py\b", re.MULTILINE)


def refuse_other_files(text: str, path: Path) -> None:
    """Refuse YAML, Python and NeMo-RL's files: as words they would be unknown arguments.

    Raises:
        HexiError: the file is of such a kind; with its line, and what to give.
    """
    match = _NEMO_RL.search(text)
    if match is not None:
        raise HexiError(
            f"{path}, line {_line(text, match)}: {match[0].strip()}: NeMo-RL trains under no plan yet; "
            "to plan the model alone, give its config.json, or Megatron's arguments, as --num-layers 32"
        )
    if path.suffix == ".py" or (not _FLAG.search(text) and _PYTHON.search(text)):
        match = _PYTHON.search(text)
        raise HexiError(
            f"{path}, line {_line(text, match) if match else 1}: this file is Python; of a Megatron Bridge "
            "recipe give the run_config.yaml that it writes, else Megatron's arguments, as --num-layers 32"
        )
    match = _YAML.search(text)
    if match is not None and (path.suffix in (".yaml", ".yml") or not _FLAG.search(text)):
        raise HexiError(
            f"{path}, line {_line(text, match)}: {match[0].strip().rstrip(':')}: this file is YAML; write "
            "its entries as flags on Megatron's command line, as --num-layers 32"
        )


def is_script(text: str) -> bool:
    """Return whether a file is a shell script: one that sets variables, or starts a training."""
    return _SCRIPT.search(text) is not None


def _line(text: str, match: re.Match[str]) -> int:
    """Return the line of a match, from 1; blanks and line breaks before its words do not count."""
    return text.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
