"""Routers of a Hugging Face model as Megatron's flags state them.

transformers' routers are in its modeling_*.py, Megatron's in megatron/core/transformer/moe/moe_utils.py; a
test compares which experts both choose, and with which weights.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_hexi.errors import NoFlagError
from megatron_hexi.models.hugging_face.config import Config, short
from megatron_hexi.models.hugging_face.rotary import Flags

#: Experts whose scores transformers adds up to compare groups of experts.
_SCORES_OF_GROUP = 2


def router_flags(config: Config) -> Flags:
    """Return Megatron's flags for a model's routers; empty for a dense model.

    Raises:
        HexiError: a value is not usable.
        NoFlagError: Megatron does not have such a router.
    """
    if config.has("routed_scaling_factor"):
        return [*_scored(config), *_balancing(config, *_scored_loss(config))]
    if not config.has("num_experts_per_tok"):
        return []
    return [*_softmax(config), *_balancing(config, "aux_loss", config.share("router_aux_loss_coef"))]


def balancing_note(config: Config, flags: Flags) -> str:
    """Return a note where transformers trains without the flags' load-balancing loss, else an empty text."""
    coefficient = dict(flags).get("--moe-aux-loss-coeff")
    if coefficient is None or config.values.get("output_router_logits") is True:
        return ""
    why = "computes no load-balancing loss for this type"
    if config.has("router_aux_loss_coef"):
        why = "adds the load-balancing loss only where output_router_logits is true"
    return untrained_loss(str(config.path), why, coefficient)


def untrained_loss(model: str, why: str, coefficient: str) -> str:
    """Return a note that the flags of a model have a load-balancing loss, and why transformers has none."""
    return (
        f"{model}: transformers {why}; the lines train with it (--moe-aux-loss-coeff {coefficient}): "
        "append --moe-router-load-balancing-type none to train without"
    )


def _softmax(config: Config) -> Flags:
    """Return the flags of a router with a softmax over the chosen experts' scores, or over all scores.

    Megatron's default is the former. A softmax over all, normalised over the chosen experts, equals it.
    """
    over_chosen = config.flag("norm_topk_prob") if config.has("norm_topk_prob") else True
    active = config.size("num_experts_per_tok")
    if over_chosen and active == 1:
        _lack(config, "num_experts_per_tok", active, "Megatron has no softmax over one expert")
    return [
        ("--moe-router-score-function", "softmax"),
        *([] if over_chosen else [("--moe-router-pre-softmax", "")]),
    ]


def _scored(config: Config) -> Flags:
    """Return the flags of a router with sigmoid scores, perhaps limited to the best groups of experts."""
    active, normalised = config.size("num_experts_per_tok"), config.flag("norm_topk_prob")
    if normalised != (active > 1):
        problem = (
            "Megatron normalises sigmoids over the chosen experts where those are several, and only then"
        )
        _lack(config, "norm_topk_prob", normalised, problem)
    flags = [("--moe-router-score-function", "sigmoid")]
    groups, chosen = (config.size(name, 1) if config.has(name) else 1 for name in ("n_group", "topk_group"))
    if groups > 1 and chosen < groups:
        if active // chosen != _SCORES_OF_GROUP:
            problem = (
                f"Megatron compares groups by num_experts_per_tok / topk_group = {active // chosen} scores"
            )
            _lack(config, "topk_group", chosen, f"{problem}, transformers by {_SCORES_OF_GROUP}")
        flags += [("--moe-router-num-groups", str(groups)), ("--moe-router-group-topk", str(chosen))]
    scale = config.number("routed_scaling_factor")
    return [*flags, *([] if scale == 1 else [("--moe-router-topk-scaling-factor", str(scale))])]


def _scored_loss(config: Config) -> tuple[str, float]:
    """Return kind and coefficient of the load-balancing loss beside the bias; 0 if the file gives none."""
    if not config.has("aux_loss_alpha"):
        return "aux_loss", 0.0
    coefficient = 0.0 if config.get("aux_loss_alpha") is None else config.share("aux_loss_alpha")
    return "seq_aux_loss" if config.flag("seq_aux") else "aux_loss", coefficient


def _balancing(config: Config, kind: str, coefficient: float) -> Flags:
    """Return the flags of the load-balancing loss, with the file's coefficient.

    The coefficient is taken as it is, although transformers computes one mean over the tokens of all layers,
    and Megatron adds up the layers' losses and counts a token as often as it is routed.
    """
    if not coefficient:
        return [("--moe-router-load-balancing-type", "none")]
    return [("--moe-router-load-balancing-type", kind), ("--moe-aux-loss-coeff", str(coefficient))]


def _lack(config: Config, field: str, value: Any, problem: str) -> NoReturn:
    raise NoFlagError(
        f"{config.path}: {field} = {short(value)}: {problem}; change it in a copy to train another model of "
        "the same shapes"
    )
