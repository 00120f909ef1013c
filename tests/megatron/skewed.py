"""Our entry point with routers that send each row where the first argument says.

``one``: to expert 0 and the next; ``even``: to experts in turn.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    """Train."""
    how = sys.argv.pop(1)
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_hexi import pretrain_gpt

    gating = TopKRouter.gating

    def forced(self: Any, hidden: Tensor) -> Tensor:
        logits = gating(self, hidden)
        count = logits.shape[-1]
        rows = torch.arange(logits.shape[:-1].numel(), device=logits.device).view(logits.shape[:-1])
        first = torch.zeros_like(rows) if how == "one" else rows % count
        push = torch.zeros_like(logits)
        push.scatter_(-1, first[..., None], 200.0)
        push.scatter_(-1, ((first + 1) % count)[..., None], 100.0)
        return logits + push

    TopKRouter.gating = forced
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
