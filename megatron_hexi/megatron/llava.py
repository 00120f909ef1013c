"""Megatron's LLaVAModel under a plan: text and images are merged in whole sequences, then cut.

Each rank of a domain encodes all images of its sequences, and gives the decoder its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megatron_hexi.errors import PlanError, user_errors
from megatron_hexi.megatron.encoder import encoder_patch
from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.stage_checkpoints import attributes
from megatron_hexi.patching import patched

_MODEL = "megatron.core.models.multimodal.llava_model:LLaVAModel"
_VERSIONS = ">=0.19"


@patched(
    f"{_MODEL}.__init__",
    only=_VERSIONS,
    why="compares the plan's length with that of text and images, which the plan cuts",
)
def _for_whole_sequences(
    original: Callable[..., None],
    self: Any,
    language_transformer_config: Any,
    language_transformer_layer_spec: Any,
    language_vocab_size: int,
    language_max_sequence_length: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    session, config, length = active_session(), language_transformer_config, language_max_sequence_length
    given = config, language_transformer_layer_spec, language_vocab_size, length
    if session is None:
        return original(self, *given, *args, **kwargs)
    with user_errors():
        if session.stages is not None:
            raise PlanError(
                f"{session.given.path}: its stages have layers of their own, and LLaVAModel's encoder is "
                "none; make a plan with planner: {unequal_stages: false} in the cluster file"
            )
        if length != session.seq_length:
            raise PlanError(
                f"LLaVAModel has sequences of {length} tokens of text and images, the plan "
                f"{session.given.path} was made for {session.seq_length}; make a plan for {length}, give "
                f"--seq-length {length}, and the tokens of text as --dataloader-seq-length"
            )
        with attributes(config, context_parallel_size=1):
            original(self, *given, *args, **kwargs)


@patched(f"{_MODEL}._preprocess_data", only=_VERSIONS, why="gives the decoder the rows of a rank")
def _of_own_rows(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    merged, labels, loss_mask = original(self, *args, **kwargs)
    session = active_session()
    if session is None:
        return merged, labels, loss_mask
    length, shard = session.seq_length, session.shard

    def rows(whole: Tensor, axis: int) -> Tensor:
        missing = (0, 0) * (whole.dim() - 1 - axis) + (0, length - whole.shape[axis])
        return pad(whole, missing).index_select(axis, shard.positions)

    if merged is not None:
        merged = rows(merged, 0)  # [S, B, H]
    if labels is not None:
        labels, loss_mask = rows(labels, 1), rows(loss_mask, 1)
        loss_mask[:, shard.tokens :] = 0
    return merged, labels, loss_mask


@patched(f"{_MODEL}.forward", only=_VERSIONS, why="refuses packed sequences, and drops lengths of equal ones")
def _not_packed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    packed = kwargs.get("packed_seq_params")
    if active_session() is not None and packed is not None:
        with user_errors():
            if packed.qkv_format != "sbhd":
                raise PlanError(
                    "--use-packed-sequence: a plan divides sequences of text and images as they are; leave "
                    "it out"
                )
        kwargs["packed_seq_params"] = None
    return original(self, *args, **kwargs)


@patched(
    "megatron.core.models.multimodal.context_parallel:get_padding",
    only=_VERSIONS,
    why="a plan divides sequences of any length",
)
def _without_padding(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    return original(*args, **kwargs) if active_session() is None else 0


@patched(
    "megatron.core.models.mimo.model.base:MimoModel.__init__",
    only=_VERSIONS,
    why="refuses a model that divides its sequences itself",
)
def _not_mimo(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    session = active_session()
    if session is not None:
        with user_errors():
            raise PlanError(
                f"{session.given.path}: MimoModel divides its sequences itself; train an LLaVAModel, or "
                "leave --hexi-plan out"
            )
    original(self, *args, **kwargs)


LLAVA_PATCHES = (
    _for_whole_sequences,
    *(
        encoder_patch(f"megatron.core.models.vision.{encoder}", only=_VERSIONS)
        for encoder in ("clip_vit_model:CLIPViTModel", "radio:RADIOViTModel")
    ),
    _of_own_rows,
    _not_packed,
    _without_padding,
    _not_mimo,
)
