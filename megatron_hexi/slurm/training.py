"""The arguments that a training run starts with: the user's, completed for restarts under Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.argument_file import last_value
from megatron_hexi.errors import HexiError

#: Megatron writes its name last into a folder of checkpoints, and goes on only where it is there.
TRACKER = "latest_checkpointed_iteration.txt"

#: What Megatron does at every start, so that a second one would undo the first; and what to give instead.
_EVERY_START = {
    "--finetune": "begins again at iteration 0 at every start; give --pretrained-checkpoint FOLDER instead, "
    "and no --load",
    "--ckpt-step": f"loads that step at every start; leave it out, and write the number into {TRACKER} of a "
    "copy of the folder",
}


@dataclass(frozen=True)
class TrainingStart:
    """Arguments and checkpoint folders with which a training run starts."""

    words: tuple[str, ...]
    save: str
    load: str


def plan_start(
    words: Sequence[str], path: Path, *, plan: str, checkpoints: str, save_interval: int, again: bool
) -> TrainingStart:
    """Complete the user's arguments with what a training run under Slurm needs.

    The user's --save, --load, --save-interval and --ckpt-format stand. Without --load, the run goes on
    from where it saves. With another --load, it begins there, and goes on from where it saves when Slurm
    starts the job again.

    Args:
        plan: the file that ranks are placed by.
        checkpoints: folder for checkpoints, if the user names none.

    Raises:
        HexiError: the training could not go on after a failure, or the plan is another one.
    """
    flags = {word.partition("=")[0] for word in words}
    for flag, why in _EVERY_START.items():
        if flag in flags:
            raise HexiError(f"{path}: {flag} {why}")
    own_plan = last_value(words, "--hexi-plan", path)
    if own_plan not in (None, plan):
        raise HexiError(
            f"{path}: --hexi-plan {own_plan}, and ranks are placed by {plan}; leave it out, and set "
            f"PLAN={own_plan} where the job is submitted"
        )
    save = last_value(words, "--save", path) or checkpoints
    own_load = last_value(words, "--load", path)
    load = own_load or save
    if Path(load) != Path(save) and (Path(save) / TRACKER).exists():
        if not again:
            raise HexiError(
                f"{path}: --load {load}, and {save}, where it saves, holds a checkpoint already; leave out "
                "--load to go on from that, or save to another folder"
            )
        load = save
    defaults = {
        "--hexi-plan": plan,
        "--save": save,
        "--load": load,
        "--save-interval": str(save_interval),
        "--ckpt-format": "torch_dist",
    }
    # Of a flag that is given twice, Megatron takes the last.
    added = [flag for flag in defaults if flag not in flags or (flag == "--load" and load != own_load)]
    return TrainingStart((*words, *(word for flag in added for word in (flag, defaults[flag]))), save, load)
