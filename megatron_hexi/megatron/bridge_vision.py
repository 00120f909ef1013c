"""Vision-language models of Megatron Bridge under a plan: whole sequences are embedded, then cut.

Bridge's model embeds all text and images of a sequence, and takes the positions of all tokens on three axes.
Each rank of a domain does so; the decoder gets the rank's rows, whose gradients return to their images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.batch import Batch, cut_batch
from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.bridge_data import whole_sequences
from megatron_hexi.megatron.session import active_session, given_plan
from megatron_hexi.megatron.stages.stage_checkpoints import attributes
from megatron_hexi.patching import patched


def has_vision(model: Any) -> bool:
    """Return whether a model's configuration is that of a vision-language model which a plan carries out."""
    from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

    provider = Qwen25VLModelProvider
    return isinstance(model, provider) and type(model).provide is provider.provide


def refuse_vision(config: Any) -> None:
    """Refuse what a plan does not carry out beside vision.

    Args:
        config: Bridge's `ConfigContainer` of a vision-language model, whose plan has been read.

    Raises:
        HexiError: the configuration, or the plan, has such a thing.
    """
    if config.peft is not None:
        raise HexiError(
            f"peft {type(config.peft).__name__}: adapters of a model with vision are not tested under a "
            "plan yet; train all weights"
        )
    if config.dataset.enable_in_batch_packing:
        raise HexiError(
            "dataset.enable_in_batch_packing True: positions on three axes are taken for whole sequences "
            "only; give False"
        )
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


BRIDGE_VISION_PATCHES = (_of_own_losses, _embedded_whole)
