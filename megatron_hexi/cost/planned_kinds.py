"""Models that are not planned, and terms of a job that a model does not have."""

from __future__ import annotations

from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import spell_flag

_NOT_MODELLED = "its time and memory are not modelled; plan with hexi proportion, which asks for no model"


def refuse_unplanned(model: Model) -> None:
    """Refuse a model with a kind of layer that is not planned.

    Counting its weights and printing Megatron's flags for it need neither.

    Raises:
        HexiError: the model has such layers; with the kind.
    """
    kinds = {
        "attention in chunks": (model.window is not None and model.window.in_chunks, _NOT_MODELLED),
        "multi-token prediction beside experts": (
            model.mtp_layers > 0 and model.experts is not None,
            "training refuses it in stages; leave --mtp-num-layers out",
        ),
    }
    for kind, (has, why) in kinds.items():
        if has:
            raise HexiError(f"model {model.name}: {kind} is not supported: {why}")


def refuse_imbalance(imbalance: float | None, model: Model) -> None:
    """Refuse an imbalance of experts' loads for a model that has none.

    Args:
        imbalance: what the user gave; ``None``: nothing.
        model: the model.

    Raises:
        HexiError: it is given; with its flag.
    """
    if imbalance is not None and model.experts is None:
        flag = spell_flag("expert_imbalance", imbalance)
        raise HexiError(f"{flag}: {model.name} has no experts; leave it out")
