"""Our entry point with a planner that moves layers: by the plans of `plans.json`, one a round.

The ranks keep what each round has copied in `kept`, and what they have loaded of it, saved again by the next
plan, in `again`.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

from megatron_hexi import pretrain_gpt
from megatron_hexi.elastic.copy_files import copy_folder
from megatron_hexi.elastic.training import copying
from megatron_hexi.elastic.training.goodput import present_round
from megatron_hexi.replan.training import replanning


class Mover:
    """In place of the planner: wants the plan after the present one, until the last."""

    def __init__(self, opening: dict[str, Any]) -> None:
        round_ = present_round()
        assert round_ is not None, "the job is elastic"
        present, *self._left = json.loads(Path("plans.json").read_text())[round_.number - 1 :]
        assert opening["plan"] == present
        self._asked: list[dict[str, Any]] = []

    def ask(self, document: dict[str, Any]) -> None:
        self._asked.append(document)

    def hear(self) -> dict[str, Any] | None:
        if not self._asked:
            return None
        advice = {"speeds": [1.0], "changed": [], "present_s": 1.0, "best_s": 1.0, "gain": 0.0, "plan": None}
        more = {"by_gpu": {"0": 1.0}, "reason": "the test wants it", "restart": "other", "restart_s": 0.5}
        moved = self._left[0] if self._left else None
        return {"iteration": self._asked.pop(0)["iteration"], **advice, **more, "moved": moved}


def _kept(copy: Any) -> Any:
    @functools.wraps(copy)
    def copy_and_keep(self: Any, iteration: int, save: Any) -> None:
        copy(self, iteration, save)
        folder = copy_folder(self._copies, self._name, iteration)
        shutil.copytree(folder, Path("kept", folder.name), dirs_exist_ok=True)

    return copy_and_keep


def _saved_again(step: Any) -> Any:
    begun = False

    @functools.wraps(step)
    def train_step(*words: Any, **named: Any) -> Any:
        nonlocal begun
        args = get_args()
        if not begun and args.iteration:
            copying._write_without_a_server()
            with copying._saved_elsewhere(args, Path("again").absolute()):
                training.save_checkpoint(args.iteration, *words[2:5], 0)
        begun = True
        return step(*words, **named)

    return train_step


def main() -> None:
    """Train."""
    setattr(replanning, "PlannerConnection", Mover)  # noqa: B010
    setattr(copying.Copier, "copy", _kept(copying.Copier.copy))  # noqa: B010
    setattr(training, "train_step", _saved_again(training.train_step))  # noqa: B010
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
