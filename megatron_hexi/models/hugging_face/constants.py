"""Megatron's flags for those constants of a Hugging Face model that do not follow from its shapes."""

from __future__ import annotations

import contextlib
import json
from typing import NoReturn

from megatron_hexi.errors import NoFlagError
from megatron_hexi.models.hugging_face.config import Config
from megatron_hexi.models.hugging_face.fields import NAMES_OF_ONE_FIELD
from megatron_hexi.models.hugging_face.layers import hybrid_pattern
from megatron_hexi.models.hugging_face.rotary import check_rotary_by_kind, rotary_flags
from megatron_hexi.models.hugging_face.routers import router_flags

#: Standard deviation of initial weights without --init-method-std.
_INIT_STD = 0.02
#: Factor in the sigmoid of Megatron's --quick-geglu (megatron/core/fusions/fused_bias_geglu.py).
_QUICK_GELU = 1.702
#: GPT-2's activations, with the flags that make Megatron compute the same. Its fused kernel has the tanh
#: approximation (megatron/core/fusions/fused_bias_gelu.py), without the kernel it takes the error function.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ()),
    "gelu": (("--no-bias-gelu-fusion", ""),),
}


def constants_of(config: Config) -> list[tuple[str, str]]:
    """Return Megatron's flags for the constants of a config.json, as pairs (flag, value).

    The value of a flag that takes none is empty.

    Raises:
        HexiError: a value is not usable.
        NoFlagError: Megatron has no flag for a value; with file, field and remedy.
    """
    epsilon = next(name for name in NAMES_OF_ONE_FIELD[0] if config.has(name))
    flags = [("--norm-epsilon", str(config.number(epsilon)))]
    std = config.number("initializer_range")
    if std != _INIT_STD:
        flags.append(("--init-method-std", str(std)))
    if config.model_type == "nemotron_h":
        flags += [("--squared-relu", ""), ("--position-embedding-type", "none")]
        return [*flags, *_hybrid_routers(config)]
    if config.model_type == "gpt2":
        activation = config.get("activation_function")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            config.refuse("activation_function", activation, f"give a model with {' or '.join(_ACTIVATIONS)}")
        flags += _ACTIVATIONS[activation]
        return flags
    if config.model_type == "gemma3_text":
        _lack_gemma(config)
    if config.model_type == "llama4_text":
        _lack_llama4(config)
    if config.model_type == "qwen3_next":
        flags.append(("--apply-layernorm-1p", ""))  # weights of its norms are stored less 1
    flags += _hybrid_routers(config) if config.has("conv_L_cache") else router_flags(config)
    if config.model_type == "gpt_oss":
        flags += _clamped_activation(config)
    flags += rotary_flags(config)
    if config.model_type == "qwen2" or (config.model_type == "glm4_moe" and config.flag("attention_bias")):
        flags.append(("--add-qkv-bias", ""))
    return flags


def _hybrid_routers(config: Config) -> list[tuple[str, str]]:
    return router_flags(config) if "E" in hybrid_pattern(config) else []


def _clamped_activation(config: Config) -> list[tuple[str, str]]:
    """Return the flags for x sigmoid(1.702 x) (1 + y), x and y clamped, which take the place of --swiglu."""
    alpha = config.number("swiglu_alpha")
    if alpha != _QUICK_GELU:
        raise NoFlagError(
            f"{config.path}: swiglu_alpha = {alpha}: Megatron's --quick-geglu always has {_QUICK_GELU}; to "
            f"train another model of the same shapes, set swiglu_alpha: {_QUICK_GELU} in a copy"
        )
    limit = config.number("swiglu_limit")
    return [
        ("--quick-geglu", ""),
        ("--glu-linear-offset", "1.0"),
        ("--activation-func-clamp-value", str(limit)),
    ]


def _lack_gemma(config: Config) -> NoReturn:
    """Check the constants of Gemma 3, and return a note that Megatron has no flags for them."""
    config.number("query_pre_attn_scalar")
    check_rotary_by_kind(config)
    _lack(config, "norms behind attention and MLP, a gate of GELU, scaled embeddings and two rotary bases")


def _lack_llama4(config: Config) -> NoReturn:
    """Check the constants of Llama 4, and say that Megatron has no flags for them."""
    for field in ("use_qk_norm", "attn_temperature_tuning"):
        config.flag(field)
    for field in ("floor_scale", "attn_scale"):
        config.number(field)
    config.share("router_aux_loss_coef")
    with contextlib.suppress(NoFlagError):
        rotary_flags(config)
    _lack(config, "attention in chunks, its temperature, and norms in layers with rotary embeddings only")


def _lack(config: Config, what: str) -> NoReturn:
    remedy = "give a file of Megatron's arguments to train a model without them"
    kind = json.dumps(config.model_type)
    raise NoFlagError(f"{config.path}: model_type = {kind}: Megatron has no flags for {what}; {remedy}")
