"""Our entry point with a planner that always wants another plan: those of a file, one after the other.

The first argument is for it: a file with a list of plans. Every report is answered by the next one.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def install(path: str) -> None:
    """Put a planner that answers with the plans of a file in place of ours."""
    plans = itertools.cycle(json.loads(Path(path).read_text()))
    from megatron_hexi.replan.training import replanning

    class Scripted:
        """In place of the planner."""

        def __init__(self, opening: dict[str, Any]) -> None:
            self._answer: dict[str, Any] | None = None

        def ask(self, document: dict[str, Any]) -> None:
            self._answer = {
                "iteration": document["iteration"],
                "speeds": [],
                "changed": [],
                "present_s": 1.0,
                "best_s": 0.5,
                "gain": 0.5,
                "reason": "the test wants it",
                "plan": next(plans),
                "digest": "0" * 64,
            }

        def hear(self) -> dict[str, Any] | None:
            answer, self._answer = self._answer, None
            return answer

    setattr(replanning, "PlannerConnection", Scripted)  # noqa: B010  (the planner's process is not part of the room)


def main() -> None:
    """Train."""
    from megatron_hexi import pretrain_gpt

    install(sys.argv.pop(1))
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
