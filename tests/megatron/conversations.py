"""Our training script with conversations to train on, without `datasets` and `transformers`.

They are stood in for by a reader of JSON lines and a tokenizer of one token a character. Megatron's own data
set packs the conversations.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy

VOCABULARY = 254


class CharacterTokenizer:
    """What Megatron's data set asks of a tokenizer for conversations."""

    vocab_size = VOCABULARY
    eod = VOCABULARY - 2
    pad = VOCABULARY - 1
    unique_identifiers = {"class": "CharacterTokenizer"}  # noqa: RUF012

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[Any, Any]:
        """Tokens, and targets in which only the assistant's words count."""
        turns = [(turn["role"], [ord(letter) for letter in turn["content"]]) for turn in conversation]
        tokens = [token for _, turn in turns for token in turn]
        targets = [token if role == "assistant" else -100 for role, turn in turns for token in turn]
        return numpy.array(tokens), numpy.array(targets)


def load_dataset(kind: str, data_files: str, split: str) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


def main() -> None:
    """Train."""
    from megatron_hexi import pretrain_gpt

    stand_in = types.ModuleType("datasets")
    stand_in.load_dataset = load_dataset  # type: ignore[attr-defined]
    sys.modules["datasets"] = stand_in
    import megatron_hexi.adaptor  # noqa: F401  (before Megatron)
    from megatron_hexi.megatron import gpt

    gpt.build_tokenizer = lambda args: CharacterTokenizer()  # type: ignore[attr-defined]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
