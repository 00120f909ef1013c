"""Attention sinks: a logit for each head that takes part in the softmax and has no value.

A sink acts as one more key whose value is 0: the merged log-sum-exp of blocks (`sums`) begins with the sink's
logit. With the merged log-sum-exp and output, the kernels' gradients of query, key and value are exact. The
gradient of a sink is minus the sum of `exp(sink - lse) dO·O` over the rows of its head (StreamingLLM, arXiv
2309.17453; the gpt-oss models have such logits).

Shape letters: B batch, h query heads of the rank, G tokens of the group, D size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinks_gradient(grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks' logits, [h].

    Args:
        grad_output: gradient of the output, [B, h, G, D].
        output: merged output, [B, h, G, D].
        log_sum_exp: merged log-sum-exp including the sinks, [B, h, G].
        sinks: logit of each head's sink, [h].
    """
    wide = log_sum_exp.dtype
    weight = torch.exp(sinks.to(wide)[:, None] - log_sum_exp)
    share = (grad_output.to(wide) * output.to(wide)).sum(dim=3)
    return -(weight * share).sum(dim=(0, 2))
