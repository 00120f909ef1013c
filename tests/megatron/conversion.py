"""Models converted in a folder, and trained from there."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from tests.megatron.forked import Forks

VOCABULARY, SEQ_LENGTH = 301, 61
TRAINING = (
    *("--seq-length", SEQ_LENGTH, "--micro-batch-size", 2, "--global-batch-size", 2, "--train-iters", 3),
    *(
        "--attention-dropout",
        0,
        "--hidden-dropout",
        0,
        "--lr",
        1e-2,
        "--eval-interval",
        100,
        "--eval-iters",
        0,
    ),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCABULARY, "--num-workers", 0),
    *("--hexi-platform", "cpu", "--no-save-optim", "--no-load-optim", "--no-save-rng", "--no-load-rng"),
)


class Conversion:
    """Conversions in a folder, and Megatron's logits of what they wrote, in forked ranks."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.folder = forks, folder

    def convert(self, *words: str) -> None:
        outcome = self.forks.launch(self.folder, ranks=1, args=words, entry="tests.megatron.converting")
        assert outcome.succeeded, outcome.why()

    def arguments(self) -> list[str]:
        return [*shlex.split((self.folder / "weights/model.args").read_text()), *map(str, TRAINING)]

    def megatron_logits(self, load: str, *more: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, S] and what Megatron makes of them on one rank, [B, S, V]."""
        words = [*self.arguments(), "--load", load, "--finetune", *more]
        outcome = self.forks.launch(self.folder, ranks=1, args=words, entry="tests.megatron.logits")
        assert outcome.succeeded, outcome.why()
        found = torch.load(self.folder / "logits.pt", weights_only=True)
        return found["tokens"], found["logits"][..., :VOCABULARY]
