"""The kinds of layers whose time and memory are not modelled yet."""

from __future__ import annotations

from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError


def refuse_unplanned(model: Model) -> None:
    """Refuse a model with a kind of layer whose time and memory the cost model lacks.

    Counting its weights and printing Megatron's flags for it need neither.

    Raises:
        HexiError: the model has such layers; with the kind.
    """
    kinds = {
        "attention in chunks": model.window is not None and model.window.in_chunks,
        "multi-token prediction": model.mtp_layers > 0,
    }
    for kind, has in kinds.items():
        if has:
            raise HexiError(
                f"model {model.name}: {kind} is not supported: its time and memory are not modelled; plan "
                "with hexi proportion, which asks for no model"
            )
