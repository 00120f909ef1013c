"""Forward passes of Megatron Bridge's models with vision: images divided, sequences embedded whole, then cut.

Bridge's models embed all text and images of a sequence, and take the positions of all tokens on three axes.
Each rank of a domain does so, with the features of its own rows alone; the decoder gets these rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.bridge_checkpoint import OF_BRIDGE
from megatron_hexi.megatron.encoder import Encode, ImageShares, encode_nothing, encoder_patch
from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.rotary import ALONE
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.stages.stage_checkpoints import attributes
from megatron_hexi.patching import patched

_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_PAYLOADS = (("pixel_values", "image_token_id"), ("pixel_values_videos", "video_token_id"))


class _Pass:
    """A forward pass of a model on whole sequences.

    Args:
        encoder: the model's encoder; ``None`` in stages behind the first.
        encode: the encoder's own forward pass, with all features of a token beside each other.
        batch: arguments of the model by name.
    """

    def __init__(
        self, session: Session, model: Any, encoder: Any, encode: Encode, batch: dict[str, Any]
    ) -> None:
        self._session, self._config, self._decoder = session, model.config, model.language_model
        self._encoder, self._encode = encoder, encode
        self._tokens, self._has_encoded = batch["input_ids"], False
        packed = packed_shard(session, document_ends(batch.get("packed_seq_params")))
        self._shard, self._documents = packed.shard, packed.documents
        self._scatters: bool = model.config.sequence_parallel
        #: Tokens that stand for the batch's features, by kind, in the order in which kinds are encoded.
        self.kinds = [
            getattr(model.config, token) for name, token in _PAYLOADS if batch.get(name) is not None
        ]

    @contextlib.contextmanager
    def run(self, encode_all: Callable[..., Any]) -> Iterator[None]:
        """Let the model call `encode_all` as its encoder within the context, and its decoder get own rows."""
        encoder, decoder = self._encoder, self._decoder

        def of_own_rows(*args: Any, **kwargs: Any) -> Any:
            with attributes(self._config, sequence_parallel=self._scatters):
                return type(decoder).forward(decoder, *args, **self._of_own_rows(**kwargs))

        # Bridge scatters whole sequences, which the tensor-parallel size need not divide.
        with attributes(self._config, sequence_parallel=False), contextlib.ExitStack() as stack:
            decoder.forward = of_own_rows
            stack.callback(delattr, decoder, "forward")
            if encoder is not None:
                encoder.forward = encode_all
                stack.callback(delattr, encoder, "forward")
            yield

    def encode(self, pixels: Tensor, grids: Tensor, kinds: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the features of images for the embeddings, and those that layers add to this rank's rows.

        Args:
            kinds: tokens that stand for the features.

        Returns:
            Features of all tokens, [F, H], which are 0 outside the rank's rows; and for each layer that adds
            some, those of the rank's rows, [M, H].
        """
        self._has_encoded = True
        seen = torch.isin(self._tokens, torch.tensor(kinds, device=self._tokens.device))
        merge = self._encoder.spatial_merge_size
        images = ImageShares.of(self._session, grids, merge, seen, self._documents)
        first, *further = images.encode(self._encode, pixels).split(self._config.hidden_size, 1)
        return images.whole(first), further

    def _of_own_rows(self, decoder_input: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the decoder's arguments with this rank's rows."""
        from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

        if decoder_input is not None:
            if not self._has_encoded and torch.is_grad_enabled():
                # A sum of no features is 0; the encoder's gradients are ready, as on ranks with images.
                patches = self._encoder.patch_embed.proj.weight.flatten(1)
                nothing = encode_nothing(self._encode, self._encoder.spatial_merge_size, patches)
                decoder_input = decoder_input + nothing.sum()
            decoder_input = decoder_input[:, self._session.samples]
            decoder_input = decoder_input.index_select(0, self._shard.positions)
            if self._scatters:
                decoder_input = scatter_to_sequence_parallel_region(decoder_input)
        if "visual_pos_masks" in kwargs:  # a Qwen3-VL, which cuts positions and features itself
            own = kwargs["position_ids"][:, self._session.samples]
            kwargs["position_ids"] = own.index_select(2, self._shard.positions)
            self._decoder.rotary_pos_emb.is_thd_format = True  # so the rotary embedding does not cut them
        if kwargs.get("visual_pos_masks") is not None:
            kwargs |= self._of_further_features(kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"])
        return kwargs | {"decoder_input": decoder_input}

    def _of_further_features(self, mask: Tensor, features: list[Tensor]) -> dict[str, Any]:
        """Return which of this rank's rows layers add features to, and these features.

        Args:
            mask: whether a token stands for a feature, [B, S].
            features: features of the rows of the domain's unit, [M, H].
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        mask = mask[self._session.samples].index_select(1, self._shard.positions)
        mask[:, self._shard.tokens :] = False
        if self._scatters:
            numbers = mask.flatten().cumsum(0).view_as(mask) - 1
            parts = parallel_state.get_tensor_model_parallel_world_size()
            part = parallel_state.get_tensor_model_parallel_rank()
            mask, numbers = (rows.chunk(parts, 1)[part] for rows in (mask, numbers))
            # Each rank of the unit encodes all of the unit's images, and needs all of their gradients.
            whole = map(copy_to_tensor_model_parallel_region, features)
            features = [rows.index_select(0, numbers[mask]) for rows in whole]
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": features}


@patched(
    "megatron.bridge.models.qwen_vl.modeling_qwen25_vl:Qwen25VLModel.forward",
    why="divides images by the plan, and gives the decoder the rows of a rank",
    **OF_BRIDGE,
)
def _qwen25(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    session = active_session()
    if session is None:
        return original(self, *args, **kwargs)
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    encoder: Any = getattr(self, "visual", None)

    def encode(pixels: Tensor, grids: Tensor) -> Tensor:
        output = type(encoder).forward(encoder, pixels, grid_thw=grids, return_dict=True)
        features: Tensor = output.pooler_output
        return features

    own = _Pass(session, self, encoder, encode, kwargs)

    def encode_all(pixels: Tensor, grid_thw: Tensor, **_: Any) -> Any:
        features, _further = own.encode(pixels, grid_thw, [own.kinds.pop(0)])
        return BaseModelOutputWithPooling(pooler_output=features)

    with own.run(encode_all):
        return original(self, *args, **kwargs)


@patched(
    f"{_QWEN3}.model:Qwen3VLModel.forward",
    why="divides images by the plan, and gives the decoder the rows of a rank",
    **OF_BRIDGE,
)
def _qwen3(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    session = active_session()
    if session is None:
        return original(self, *args, **kwargs)
    encoder = self.vision_model

    def encode(pixels: Tensor, grids: Tensor) -> Tensor:
        first, further = type(encoder).forward(encoder, pixels, grids)
        return torch.cat([first, *further], 1)

    own = _Pass(session, self, encoder, encode, kwargs)

    def encode_all(hidden_states: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        return own.encode(hidden_states, grid_thw, own.kinds)

    groups = copy.copy(self.pg_collection)
    groups.cp = ALONE  # so the model leaves sequences whole
    with own.run(encode_all), attributes(self, pg_collection=groups):
        return original(self, *args, **kwargs)


@patched(
    f"{_QWEN3}.transformer_block:Qwen3VLVisionTransformerBlock._checkpointed_forward",
    why="features of layers that are computed again have gradients",
    **OF_BRIDGE,
)
def _with_gradients(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if active_session() is None:
        return original(self, *args, **kwargs)
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import transformer_block as block

    of_megatron = SimpleNamespace(
        checkpoint=_of_tensors(block.tensor_parallel.checkpoint), random=block.tensor_parallel.random
    )
    of_engine = _of_tensors(getattr(block, "te_checkpoint", None))
    with attributes(block, tensor_parallel=of_megatron, te_checkpoint=of_engine):
        return original(self, *args, **kwargs)


def _of_tensors(checkpoint: Any) -> Callable[..., tuple[Tensor, list[Tensor], None]]:
    """Return a checkpoint of layers whose features, a list in Bridge, are outputs that autograd sees."""

    def checkpointed(run: Callable[..., Any], *args: Any) -> tuple[Tensor, list[Tensor], None]:
        def flat(*inputs: Any) -> tuple[Tensor, ...]:
            hidden, features, _context = run(*inputs)
            return hidden, *features

        hidden, *features = checkpoint(flat, *args)
        return hidden, features, None

    return checkpointed


BRIDGE_ENCODER_PATCHES = (
    _qwen25,
    _qwen3,
    _with_gradients,
    encoder_patch(f"{_QWEN3}.vision_model:Qwen3VLVisionModel", **OF_BRIDGE),
)
