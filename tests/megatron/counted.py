"""Our entry point, which also counts: a rank says at the end how many sequences it trained attention on."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from megatron_hexi.runtime import DomainAttention

_SAID = "sequences in attention:"


def main() -> None:
    """Train, and print the count: sequences times layers; evaluation and what is recomputed do not count."""
    from megatron_hexi import pretrain_gpt

    original, counted = DomainAttention.__call__, 0

    @functools.wraps(original)
    def call(self: DomainAttention, query: Any, *rest: Any, **kwargs: Any) -> Any:
        nonlocal counted
        if torch.is_grad_enabled():
            counted += query.shape[1]
        return original(self, query, *rest, **kwargs)

    DomainAttention.__call__ = call  # type: ignore[method-assign]
    pretrain_gpt.main()
    print(_SAID, counted)


def counts(output: str) -> list[int]:
    """What the ranks said, in the order of their output."""
    return [int(count) for count in re.findall(rf"{_SAID} (\d+)", output)]
