"""Our entry point without a plan, where further tokens are predicted within documents.

Documents begin where the positions begin anew (``--reset-position-ids``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def main() -> None:
    """Train on one rank."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_token_prediction

    from megatron_hexi import pretrain_gpt

    forward = GPTModel.forward
    #: Whether each token of the micro-batch is the last of its document.
    last = torch.zeros(())

    def noting(self: Any, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        last = position_ids.roll(-1, -1) == 0
        return forward(self, input_ids, position_ids, *args, **kwargs)

    def rolled(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        following = tensor.roll(-1, -1).masked_fill(last, 0)
        return following, following.sum()

    GPTModel.forward = noting
    multi_token_prediction.roll_tensor = rolled
    pretrain_gpt.main()
