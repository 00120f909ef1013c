"""Vision-language models of Megatron Bridge under a plan: whole sequences are embedded, then cut.

Bridge's models embed all text and images of a sequence, and take the positions of all tokens on three axes.
Each rank of a domain does so; the decoder gets the rank's rows, whose gradients return to their images.
Qwen2.5-VL gives its decoder whole sequences; Qwen3-VL itself cuts them, and the features that layers add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_hexi.errors import HexiError, PlanError, user_errors
from megatron_hexi.megatron.batch import Batch, cut_batch
from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.bridge_data import whole_sequences
from megatron_hexi.megatron.session import active_session, given_plan, set_active_session
from megatron_hexi.megatron.stages.stage_checkpoints import attributes
from megatron_hexi.patching import patched

_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"


def has_vision(model: Any) -> bool:
    """Return whether a model's configuration is that of a vision-language model which a plan carries out."""
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
    from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

    kinds = (Qwen25VLModelProvider, Qwen3VLModelProvider, Qwen3VLMoEModelProvider)
    return any(isinstance(model, kind) and type(model).provide is kind.provide for kind in kinds)


def refuse_vision(config: Any) -> None:
    """Refuse what a plan does not carry out beside vision.

    Args:
        config: Bridge's `ConfigContainer` of a vision-language model, whose plan has been read.

    Raises:
        HexiError: the configuration, or the plan, has such a thing.
    """
    if config.dataset.enable_in_batch_packing:
        raise HexiError(
            "dataset.enable_in_batch_packing True: positions on three axes are taken for whole sequences "
            "only; give False"
        )
    dealt = getattr(config.model, "vision_dp_when_cp", False)
    if dealt or getattr(getattr(config.model, "dist_train", None), "use_dist_train", False):
        name = "vision_dp_when_cp" if dealt else "dist_train.use_dist_train"
        raise HexiError(f"model.{name} True: each rank of a domain embeds its images itself; give False")
    given = given_plan()
    if given is not None and given.mesh is not None:
        raise HexiError(
            f"{given.path}: its stages have layers of their own, and an encoder is none; make a plan with "
            "planner: {unequal_stages: false} in the cluster file"
        )


@patched(
    "megatron.bridge.training.vlm_step:get_batch_from_iterator",
    why="a plan's sequences all have one length; losses are those of a rank's rows",
    parameters=(
        *("data_iterator", "use_mtp", "skip_getting_attention_mask_from_dataset"),
        *("is_first_pp_stage", "is_last_pp_stage"),
    ),
    **OF_BRIDGE,
)
def _of_own_losses(
    original: Callable[..., Batch], data_iterator: Iterator[Batch], *args: Any, **kwargs: Any
) -> Batch:
    session = active_session()
    if session is None:
        return original(data_iterator, *args, **kwargs)
    sample = dict(next(data_iterator))
    if sample.get("tokens") is None:
        sample["tokens"] = sample.pop("input_ids")
    sample = whole_sequences(sample, session.seq_length)
    sample |= cut_batch({name: sample[name] for name in ("labels", "loss_mask")}, session)
    return original(iter((sample,)), *args, **kwargs)


@patched(
    "megatron.bridge.models.qwen_vl.modeling_qwen25_vl:Qwen25VLModel.forward",
    why="gives the decoder the rows of a rank, of embeddings of a whole sequence",
    **OF_BRIDGE,
)
def _embedded_whole(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    session = active_session()
    if session is None:
        return original(self, *args, **kwargs)
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    decoder, config = self.language_model, self.config
    is_scattered = config.sequence_parallel

    def of_own_rows(*args: Any, decoder_input: Tensor | None = None, **kwargs: Any) -> Any:
        with attributes(config, sequence_parallel=is_scattered):
            if decoder_input is not None:
                decoder_input = decoder_input.index_select(0, session.shard.positions)
                if is_scattered:
                    decoder_input = scatter_to_sequence_parallel_region(decoder_input)
            return type(decoder).forward(decoder, *args, decoder_input=decoder_input, **kwargs)

    # Bridge scatters whole sequences, which the tensor-parallel size need not divide.
    with attributes(config, sequence_parallel=False):
        decoder.forward = of_own_rows
        try:
            return original(self, *args, **kwargs)
        finally:
            del decoder.forward


@patched(
    f"{_QWEN3}.vision_model:Qwen3VLVisionModel.__init__",
    why="an encoder's attention is its own: of whole images, without a mask",
    **OF_BRIDGE,
)
def _of_whole_images(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    session = active_session()
    set_active_session(None)
    try:
        original(self, *args, **kwargs)
    finally:
        set_active_session(session)


@patched(
    f"{_QWEN3}.utils:split_data_cp_rank",
    why="takes the rows at the plan's positions instead of two equal chunks",
    **OF_BRIDGE,
)
def _at_positions(
    original: Callable[..., Tensor], val: Tensor, cp_size: int, seq_dim: int, cp_rank: int | None = None
) -> Tensor:
    session = active_session()
    if session is None:
        return original(val, cp_size, seq_dim, cp_rank)
    return val.index_select(seq_dim, session.shard.positions)


@patched(
    f"{_QWEN3}.utils:split_deepstack_embs",
    why="takes the features of the plan's rows, which the first layers add, instead of two equal chunks",
    parameters=(
        *("visual_pos_masks", "deepstack_visual_embeds", "tp_size", "tp_rank", "cp_size", "cp_rank"),
        "sequence_parallel",
    ),
    **OF_BRIDGE,
)
def _features_at_positions(
    original: Callable[..., Any],
    visual_pos_masks: Tensor | None,
    deepstack_visual_embeds: list[Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    session = active_session()
    if session is None or visual_pos_masks is None:
        return original(visual_pos_masks, deepstack_visual_embeds, *args, **kwargs)
    numbers = visual_pos_masks.flatten().cumsum(0).view_as(visual_pos_masks) - 1
    mask, own = (one.index_select(1, session.shard.positions) for one in (visual_pos_masks, numbers))
    return mask, [features.index_select(0, own[mask]) for features in deepstack_visual_embeds]


@patched(
    "megatron.bridge.models.qwen_vl.qwen3_vl_step:forward_step",
    why="refuses a step that packs sequences for equal parts",
    **OF_BRIDGE,
)
def _not_by_equal_parts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active_session() is not None:
        with user_errors():
            raise PlanError(
                "qwen3_vl_step.forward_step: packs sequences for equal parts; give forward_step of "
                "megatron.bridge.training.vlm_step"
            )
    return original(*args, **kwargs)


BRIDGE_VISION_PATCHES = (
    _not_by_equal_parts,
    _of_own_losses,
    _embedded_whole,
    _of_whole_images,
    _at_positions,
    _features_at_positions,
)
