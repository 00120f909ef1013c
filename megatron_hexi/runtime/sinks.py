"""Attention sinks: a logit for each head that takes part in the softmax and has no value.

It is one more key of which only the log-sum-exp knows: the sum of blocks (`sums`) begins with it. With the
merged log-sum-exp and output the gradients of query, key and value are exact as they are; the sink's is minus
the sum over its rows of `exp(sink - lse) dO·O`, the gradient for a key whose value is 0 (StreamingLLM,
arXiv 2309.17453; the gpt-oss models have such logits).

Shape letters: B batch, h own query heads, G tokens of the group, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinks_gradient(grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the logits, [h].

    Args:
        grad_output: [B, h, G, D].
        output: [B, h, G, D].
        log_sum_exp: [B, h, G], with the sinks.
        sinks: logit of each head, [h].
    """
    wide = log_sum_exp.dtype
    weight = torch.exp(sinks.to(wide)[:, None] - log_sum_exp)
    share = (grad_output.to(wide) * output.to(wide)).sum(dim=3)
    return -(weight * share).sum(dim=(0, 2))
