"""A stage's model as ministages: Megatron's model is built whole, and a ministage runs some of its layers.

Layers are numbered and named by their place in the model, as checkpoints and windows need it: the layers of a
stage are then not consecutive.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Parameter

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.stages.stage_checkpoints import attributes
from megatron_hexi.mesh import MinistageId
from megatron_hexi.patching import patched
from megatron_hexi.plan.units import Unit


class StageSlices:
    """A stage's model, of which one ministage at a time can be active.

    Args:
        model: Megatron's model, wrapped or not.
    """

    def __init__(self, model: Any, place: Unit) -> None:
        from megatron.core.utils import get_attr_wrapped_model

        self._whole = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
        # Beside an encoder of images the decoder's model is a part.
        self._model = getattr(self._whole, "language_model", self._whole)
        self._decoder = self._model.decoder
        layers = iter(self._decoder.layers)
        assert place.ministages is not None
        sizes = [stop - start for start, stop in place.ministages]
        self._layers = [torch.nn.ModuleList(itertools.islice(layers, size)) for size in sizes]
        self.count = len(self._layers)
        self._is_first, self._is_last = place.stage == 0, place.is_last
        self._place = place
        self._uses = self._find_uses()

    def _find_uses(self) -> dict[Parameter, set[int]]:
        """Return the ministages that use each parameter: two for tied embeddings at both ends of a stage."""
        model, last = self._model, self.count - 1
        uses: dict[Parameter, set[int]] = {}
        modules = list(enumerate(self._layers))
        if self._is_first:
            modules.append((0, model.embedding))
            if self._whole is not model:  # what else it has is the encoder
                modules += [(0, part) for part in self._whole.children() if part is not model]
        if self._is_last:
            norm = "final_norm" if model.config.is_hybrid_model else "final_layernorm"
            modules += [(last, getattr(self._decoder, norm)), (last, model.output_layer)]
            if model.mtp_process:
                modules += [(last, model.mtp), (last, model.embedding)]
            if model.share_embeddings_and_output_weights:
                uses[model.shared_embedding_or_output_weight()] = {last}
        for number, module in modules:
            for parameter in module.parameters():
                uses.setdefault(parameter, set()).add(number)
        return uses

    def ministage_of(self, parameter: Parameter) -> MinistageId | None:
        """Return the only ministage that uses a parameter; ``None``: several do, or all are interleaved.

        Interleaved ministages use their weights over the whole iteration.
        """
        if not self._place.in_turn:
            return None
        first, *more = self._uses[parameter]
        return None if more else (self._place.replica, self._place.stage, first)

    def takes_tokens(self, number: int) -> bool:
        """Whether a ministage begins with the embedding; others begin with rows of the one before."""
        return self._is_first and number == 0

    def gives_loss(self, number: int) -> bool:
        """Whether a ministage ends with the loss; others end with rows for the one behind."""
        return self._is_last and number == self.count - 1

    @contextlib.contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Make the model one ministage inside a context, also while its backward pass recomputes layers."""
        first, last = self.takes_tokens(number), self.gives_loss(number)
        model, decoder = self._model, self._decoder
        with contextlib.ExitStack() as stack:
            if model.share_embeddings_and_output_weights and last:
                # A model that does not begin with the embedding looks for a copy that is not here.
                shared = model.shared_embedding_or_output_weight()
                model.shared_embedding_or_output_weight = lambda: shared
                stack.callback(delattr, model, "shared_embedding_or_output_weight")
            ends, layers = {"pre_process": first, "post_process": last}, self._layers[number]
            stack.enter_context(attributes(self._whole, **ends))
            stack.enter_context(attributes(model, **ends, mtp_process=model.mtp_process and last))
            stack.enter_context(attributes(decoder, **ends, layers=layers))
            stack.enter_context(attributes(decoder, num_layers_per_pipeline_rank=len(layers)))
            if not last and not model.config.is_hybrid_model:  # where no `post_process` means no last norm
                stack.enter_context(attributes(decoder, final_layernorm=None))
            yield

    def used_before(self, number: int) -> frozenset[Parameter]:
        """Return parameters that earlier ministages use too: their backward pass completes the gradients."""
        return frozenset(p for p, numbers in self._uses.items() if min(numbers) < number)


def layer_numbers(session: Session | None) -> list[int] | None:
    """Return the numbers of this rank's layers, counted from the first of its stage's `layers`.

    ``None``: the layers are consecutive.
    """
    place = None if session is None or session.stages is None else session.stages.view.place
    if place is None or place.ministages is None:
        return None
    assert place.layers is not None
    return [layer - place.layers[0] for start, stop in place.ministages for layer in range(start, stop)]


def _numbered(
    original: Callable[..., None],
    self: Any,
    config: Any,
    submodules: Any,
    layer_number: int = 1,
    **more: Any,
) -> None:
    """Number the layers of a ministage by their place in the model, as windows and checkpoints need."""
    session = active_session()
    # Layers that predict further tokens are numbered apart.
    numbers = None if more.get("is_mtp_layer") else layer_numbers(session)
    if session is not None and session.stages is not None and numbers is not None:
        # A layer of a hybrid model is given its place in the model, others that in their stage.
        layers = session.stages.view.place.layers
        before = layers[0] if layers is not None and config.is_hybrid_model else 0
        layer_number = before + numbers[layer_number - 1 - before] + 1
    original(self, config, submodules, layer_number, **more)


@patched(
    "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
    why="a layer is named by its number, as its state dict expects it",
)
def _named(original: Callable[..., None], self: Any) -> None:
    """Name a layer in its block by its number in the stage, as its state dict expects."""
    original(self)
    numbers = layer_numbers(active_session())
    if numbers is not None:
        self.layers._modules = {
            str(number): layer for number, layer in zip(numbers, self.layers, strict=True)
        }


@patched(
    "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.get_layer_id_list",
    why="with ministages the layers of a stage, which differ in kind, are not in a row",
    parameters=("self", "layer_type", "vp_stage", "pp_rank"),
)
def _in_turns(original: Callable[..., list[int]], self: Any, *args: Any, **kwargs: Any) -> list[int]:
    """Return the layers of a stage whose specifications are built: with ministages they are not in a row."""
    layers = original(self, *args, **kwargs)
    numbers = layer_numbers(active_session())
    return layers if numbers is None else [layers[0] + number for number in numbers]


_NOT_IN_A_ROW = "with ministages the layers of a stage are not in a row"

MINISTAGE_PATCHES = (
    _in_turns,
    patched("megatron.core.transformer.transformer_layer:TransformerLayer.__init__", why=_NOT_IN_A_ROW)(
        _numbered
    ),
    # Before 0.19 hybrid models are refused beside a plan.
    patched("megatron.core.ssm.mamba_layer:MambaLayer.__init__", why=_NOT_IN_A_ROW, only=">=0.19")(_numbered),
    _named,
)
