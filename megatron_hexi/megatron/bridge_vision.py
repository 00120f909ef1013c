"""Jobs of Megatron Bridge that train vision-language models: what a plan refuses, and their batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.errors import HexiError, PlanError, user_errors
from megatron_hexi.megatron.batch import Batch, cut_batch
from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.bridge_data import whole_sequences
from megatron_hexi.megatron.documents_ahead import AHEAD, END_KEYS
from megatron_hexi.megatron.session import active_session, given_plan
from megatron_hexi.patching import patched
from megatron_hexi.plan.units import domain_rows


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
    given = given_plan()
    assert given is not None, "the job has a plan"
    further = len(getattr(config.model.vision_config, "deepstack_visual_indexes", ()))
    chunks = config.model.virtual_pipeline_model_parallel_size
    if chunks is not None and further:
        raise HexiError(
            f"model.virtual_pipeline_model_parallel_size {chunks}: Bridge does not build a decoder in chunks "
            "whose layers add features of images; leave it out"
        )
    stages, layers = config.model.pipeline_model_parallel_size, config.model.num_layers
    for row in domain_rows(given.plan, stages=stages, layers=layers):
        if row.stage == 0 and further and (heads := config.model.vision_config.num_heads) % row.width:
            raise HexiError(
                f"{given.path}: units of the first stage of replicas[{row.replica}] have {row.width} ranks, "
                f"which do not divide the encoder's {heads} heads; give as many as do"
            )
        first = row.ministages[0] if row.ministages else row.layers
        if row.stage == 0 and first is not None and first[1] < further:
            what = "ministage" if row.ministages else "stage"
            raise HexiError(
                f"{given.path}: the first {what} of replicas[{row.replica}] has {first[1]} of the "
                f"{further} layers that add features of images; give it all of them"
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
    # Bridge moves images to the device in place, and ministages read a batch again.
    sample["visual_inputs"] = copy.copy(sample.get("visual_inputs"))
    sample = whole_sequences(sample, session.seq_length)
    AHEAD.take(sample, session.seq_length)
    sample |= cut_batch({name: sample.get(name) for name in ("labels", "loss_mask", *END_KEYS)}, session)
    return original(iter((sample,)), *args, **kwargs)


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


BRIDGE_VISION_PATCHES = (_not_by_equal_parts, _of_own_losses)
