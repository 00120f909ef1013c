"""The demo, with the ranks of all its trainings but the first forked from one process each.

The first is started as the demo starts it: one rank, under torchrun.
"""

from __future__ import annotations

import os
import sys

from scripts.quickstart import main
from scripts.quickstart.job import Launch
from tests.megatron.forked import ENTRY, prepare, run

#: As long as the demo's test waits.
TIMEOUT_S = 240.0


def train_in_forks(ranks: int, words: list[str]) -> int:
    """Be the process that forks the ranks of one training, and ends as it did."""
    prepare()
    codes = run(os.getcwd(), ranks, words, ENTRY, TIMEOUT_S)
    return 0 if codes == [0] * ranks else 1


def start_in_forks() -> None:
    """Make the demo start this module where it would start torchrun."""
    under_torchrun = vars(Launch)["command"].fget

    def command(launch: Launch) -> list[str]:
        words: list[str] = under_torchrun(launch)
        if launch.ranks == 1 and launch.iterations == 1:
            return words
        own = (sys.executable, "-m", "tests.megatron.forked_demo", str(launch.ranks))
        return [*own, *words[words.index(ENTRY) + 1 :]]

    Launch.command = property(command)  # type: ignore[assignment]


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        sys.exit(train_in_forks(int(sys.argv[1]), sys.argv[2:]))
    start_in_forks()
    sys.exit(main.main())
