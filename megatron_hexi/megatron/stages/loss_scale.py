"""What a loss scale multiplies where stages differ, so that it means what it means without a plan.

A plan has losses summed over tokens and gradients divided by the tokens of the batch at the end. Gradients in
fp16 would overflow before that: at a loss scale as much smaller as the batch has tokens, which soon is below
``--min-loss-scale``. So a loss is divided by the tokens of a full batch when it is scaled, as Megatron takes
its mean, and in the end by the rest: the tokens that did not count.
"""

from __future__ import annotations

from typing import Any

from megatron_hexi.megatron.session import active_session


def scales_losses(settings: Any) -> bool:
    """Whether Megatron scales losses.

    Args:
        settings: Megatron's arguments, or its optimizer's configuration.
    """
    is_mixed = settings.bf16 or settings.use_distributed_optimizer
    return bool(settings.fp16 or (settings.loss_scale and is_mixed))


def tokens_in_scale() -> int:
    """The tokens of a global batch, by which a loss is divided when it is scaled.

    1 where losses are not scaled, and where the user gave ``--calculate-per-token-loss``: then Megatron
    scales the sum too.
    """
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
    from megatron.training import get_args

    session = active_session()
    assert session is not None, "only a plan has stages that differ"
    if not scales_losses(get_args()) or not session.given.scales_mean:
        return 1
    return get_current_running_global_batch_size() * session.seq_length
