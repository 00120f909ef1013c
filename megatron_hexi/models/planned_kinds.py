"""Refusals of models that the planner does not support, and of job terms that a model does not have."""

from __future__ import annotations

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.models.model import Model
from megatron_hexi.plan.flags import spell_flag


def refuse_unplanned(model: Model) -> None:
    """Refuse a model with a kind of layer that is not planned.

    Its weights can still be counted, and Megatron's flags for it printed.

    Raises:
        HexiError: the model has such layers; with the kind.
    """
    if model.span.in_chunks:
        raise HexiError(
            f"model {model.name}: attention in chunks is not supported: its time and memory are not "
            "modelled; use hexi proportion, which needs no model"
        )


def refuse_unpacked(model: Model, micro_batch_size: int, *, dealt: bool) -> None:
    """Refuse packed documents where training refuses them.

    Args:
        dealt: whether each batch's documents are dealt out anew (--hexi-batch-shares).

    Raises:
        HexiError: the model has latent attention, or layers whose heads cannot move between batches, or a
            micro-batch has several sequences; with the remedy.
    """
    flag = "--document-lengths"
    if micro_batch_size > 1:
        raise HexiError(
            f"{spell_flag('micro_batch_size', micro_batch_size)}: Megatron lays packed sequences of a "
            f"micro-batch out as one; give --micro-batch-size 1, or leave {flag} out"
        )
    if model.latent is not None:
        raise HexiError(
            f"{flag}: {model.name} has latent attention, which does not train with documents yet; leave it "
            "out"
        )
    if dealt:
        refuse_undealt(model)


def refuse_undealt(model: Model) -> None:
    """Refuse documents that are dealt out anew in every batch for a model with layers that have a state.

    Raises:
        PlanError: the model has such layers.
    """
    if any(model.has_state):
        raise PlanError(
            f"--batch-shares: {model.name} has Mamba layers or delta nets, whose heads cannot move "
            "between batches; leave --batch-shares out"
        )


def refuse_imbalance(imbalance: float | None, model: Model) -> None:
    """Refuse an imbalance of experts' loads for a model without experts.

    Args:
        imbalance: the imbalance that the user gave; ``None``: the user gave none.

    Raises:
        HexiError: an imbalance is given, and the model has no experts; with its flag.
    """
    if imbalance is not None and not model.routed:
        flag = spell_flag("expert_imbalance", imbalance)
        raise HexiError(f"{flag}: {model.name} has no experts; leave the option out")
