"""Loss scaling under a plan, with the meaning that it has without a plan.

Under a plan losses are summed over tokens, and gradients divided by the tokens of the batch at the end.
Gradients in fp16 would overflow before that; a loss scale smaller by the number of tokens is soon below
``--min-loss-scale``. So a loss is divided by the tokens of a full batch when it is scaled, as in Megatron's
mean, and gradients only by the remaining factor: a batch with masked tokens has fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched


def scales_losses(settings: Any) -> bool:
    """Whether Megatron scales losses.

    Args:
        settings: Megatron's arguments, or its optimizer's configuration.
    """
    is_mixed = settings.bf16 or settings.use_distributed_optimizer
    return bool(settings.fp16 or (settings.loss_scale and is_mixed))


def tokens_in_scale() -> int:
    """Return the number by which a scaled loss is divided: the tokens of a global batch.

    1 where losses are not scaled, and where the user gave ``--calculate-per-token-loss``: then Megatron
    scales the sum too.
    """
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

    session = active_session()
    if session is None or not session.given.scales_mean or not session.given.terms.scales_losses:
        return 1
    return get_current_running_global_batch_size() * session.seq_length


@patched(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.scale_loss",
    why="a scaled loss is a part of the mean over the batch, as without a plan",
)
def _of_a_mean(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    tokens, scaled = tokens_in_scale(), original(self, loss)
    return scaled if tokens == 1 else scaled / tokens


@patched(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.scale_gradients",
    why="gradients of scaled losses are divided by the batch's tokens already",
)
def _of_what_is_left(original: Callable[..., None], self: Any, scaling_factor: Any) -> None:
    tokens = tokens_in_scale()
    original(self, scaling_factor if tokens == 1 else scaling_factor * tokens)


LOSS_SCALE_PATCHES = (
    _of_a_mean,
    _of_what_is_left,
)
