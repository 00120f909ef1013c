"""Files that hold no arguments of Megatron: what kind they are, and what to give in their place."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megatron_hexi.errors import HexiError

#: A line of YAML: a key that is a flag, or a key with nothing behind it.
_YAML = re.compile(r"^\s*(?:---\s*$|-?-?[A-Za-z_][\w-]*:(?:\s|$))", re.MULTILINE)
_PYTHON = re.compile(r"^(?:import|from)[ \t]+[A-Za-z_][\w.]*(?:[ \t]+import\b|[ \t]*$)", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s)--\w[\w-]*(?=[\s=]|$)")
#: A command of a launch script that starts training, outside a comment.
_START = re.compile(r"^[^#\n]*?(?<![\w/.-])(?:torchrun|srun|mpirun|mpiexec|python3?)[ \t]", re.MULTILINE)
#: Reinforcement learning: a pattern that only its files have, and what of a job can be planned nevertheless.
_LOOPS = {
    "slime": (r"--rollout-(?:batch-size|num-gpus|max-response-len)\b", "its scripts/models/*.sh"),
    "verl": (r"\bverl\.trainer\b|\bactor_rollout_ref\.", "its model's config.json"),
    "NeMo-RL": (r"^[ \t]+megatron_cfg:|\brun_grpo\w*\.py\b", "its model's config.json"),
}


def refuse_other_files(text: str, path: Path) -> None:
    """Refuse YAML, Python, and files of other training loops: as words they would be unknown arguments.

    Raises:
        HexiError: the file is of such a kind; with its line, and what to give.
    """
    refuse_other_loops(text, path)
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


def refuse_other_loops(text: str, path: Path) -> None:
    """Refuse files of reinforcement learning, whose own training loops know no plan.

    Raises:
        HexiError: the file is one of slime, verl or NeMo-RL.
    """
    for name, (pattern, planned) in _LOOPS.items():
        match = re.search(pattern, text, re.MULTILINE)
        if match is not None:
            raise HexiError(
                f"{path}, line {_line(text, match)}: {match[0].strip()}: {name} does not train under a plan "
                f"yet; to plan the model alone, give {planned}, or Megatron's arguments, as --num-layers 32"
            )


def is_launch_script(text: str) -> bool:
    """Return whether a file is a shell script, or has a command that starts training."""
    return text.startswith("#!") or bool(_START.search(text))


def script_error(path: Path, why: str) -> HexiError:
    """Return the error for a launch script, which must be run to know its arguments."""
    return HexiError(
        f"{path}: is a shell script, of which nothing is run here ({why}); hexi capture -o job.args -- bash "
        f"{shlex.quote(str(path))} runs it up to the start of the training and writes Megatron's arguments: "
        "give job.args in its place"
    )


def _line(text: str, match: re.Match[str]) -> int:
    """Return the line of a match, from 1; blanks and line breaks before its words do not count."""
    return text.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
