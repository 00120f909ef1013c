"""Jobs of Megatron Bridge that train vision-language models: what a plan refuses, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.errors import HexiError, PlanError, user_errors
from megatron_hexi.megatron.batch import Batch, cut_batch
from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.bridge_data import whole_sequences
from megatron_hexi.megatron.session import active_session, given_plan
from megatron_hexi.patching import patched


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
        raise HexiError(f"model.{name} True: a plan divides images, by patches of its units; give False")
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
