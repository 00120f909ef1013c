"""How a Hugging Face model chooses experts, as Megatron's flags state it.

Megatron's formulas are in `topk_routing_with_score_function` (megatron/core/transformer/moe/moe_utils.py),
transformers' in each type's router.
"""

from __future__ import annotations

from megatron_hexi.cost.hugging_face_config import Config, short
from megatron_hexi.cost.hugging_face_layers import SCORE_BIAS
from megatron_hexi.cost.hugging_face_rotary import NoFlagError

Flags = list[tuple[str, str]]


def router_flags(config: Config) -> Flags:
    """Megatron's flags for a model's router, besides its shapes; none for a model without experts.

    Raises:
        HexiError: a value that is not usable.
        NoFlagError: a router that Megatron lacks.
    """
    if config.model_type in SCORE_BIAS:
        return _sigmoid(config)
    if config.model_type not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return []
    flags: Flags = []
    if config.model_type == "qwen3_moe" and not config.flag("norm_topk_prob"):
        # Else the softmax is over the chosen experts, which is Megatron's without the flag.
        flags.append(("--moe-router-pre-softmax", ""))
    return [*flags, *_balancing(config.get("router_aux_loss_coef"), "aux_loss", config)]


def _sigmoid(config: Config) -> Flags:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice alone, the chosen normalised and scaled."""
    active = config.size("num_experts_per_tok")
    if config.flag("norm_topk_prob") == (active == 1):
        value = config.flag("norm_topk_prob")
        raise NoFlagError(
            f"{config.path}: norm_topk_prob = {short(value)}: Megatron normalises the scores of several "
            "experts, and never that of one; change it in a copy to train another model of the same shapes"
        )
    flags = [
        ("--moe-router-score-function", "sigmoid"),
        ("--moe-router-topk-scaling-factor", str(config.number("routed_scaling_factor"))),
        ("--moe-router-dtype", "fp32"),
    ]
    groups = config.size("n_group")
    if groups > 1:
        flags += [
            ("--moe-router-num-groups", str(groups)),
            ("--moe-router-group-topk", str(config.size("topk_group"))),
        ]
    if config.model_type != "glm4_moe" and config.get("aux_loss_alpha") is not None:
        flags += _balancing(
            config.get("aux_loss_alpha"), "seq_aux_loss" if config.flag("seq_aux") else "aux_loss", config
        )
    return flags


def _balancing(coefficient: object, kind: str, config: Config) -> Flags:
    if coefficient in (None, 0):
        return []
    if type(coefficient) not in (int, float):
        config.refuse("router_aux_loss_coef", coefficient, "write a number from 0")
    return [("--moe-router-load-balancing-type", kind), ("--moe-aux-loss-coeff", str(coefficient))]
