"""The constants of a Hugging Face model that its shapes leave open, and Megatron's flags for them."""

from __future__ import annotations

from megatron_hexi.cost.hugging_face_config import Config
from megatron_hexi.cost.hugging_face_rotary import NoFlagError, rotary_flags
from megatron_hexi.cost.hugging_face_router import router_flags

__all__ = ["NoFlagError", "constants_of"]

#: Standard deviation of fresh weights without --init-method-std.
_INIT_STD = 0.02
#: GPT-2's activations, with the flags that make Megatron compute the same. Its fused kernel has the tanh
#: approximation (megatron/core/fusions/fused_bias_gelu.py), what it takes without has the error function.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ()),
    "gelu": (("--no-bias-gelu-fusion", ""),),
}


#: Types of which Megatron cannot compute the layers, and what it has no flags for.
_NO_FLAGS = {
    "gemma3_text": "norms behind attention and MLP, two rotary bases, and GELU's gate",
    "llama4_text": "attention in chunks, a temperature of attention, and scores on what experts read",
}


def constants_of(config: Config) -> list[tuple[str, str]]:
    """Megatron's flags for the constants of a config.json, each with its value; empty where it takes none.

    Raises:
        HexiError: a value that is not usable.
        NoFlagError: a value that Megatron has no flag for; with file, field and remedy.
    """
    if config.model_type in _NO_FLAGS:
        raise NoFlagError(
            f"{config.path}: model_type = {config.model_type}: Megatron has no flags for "
            f"{_NO_FLAGS[config.model_type]}; give a model of another type"
        )
    gpt = config.model_type == "gpt2"
    flags = [("--norm-epsilon", str(config.number("layer_norm_epsilon" if gpt else "rms_norm_eps")))]
    std = config.number("initializer_range")
    if std != _INIT_STD:
        flags.append(("--init-method-std", str(std)))
    if gpt:
        activation = config.get("activation_function")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            config.refuse("activation_function", activation, f"give a model with {' or '.join(_ACTIVATIONS)}")
        flags += _ACTIVATIONS[activation]
    else:
        flags += rotary_flags(config)
    if config.model_type == "qwen2":
        flags.append(("--add-qkv-bias", ""))
    if config.model_type == "gpt_oss":
        # A gate of x sigmoid(1.702 x) times one more than the rest, both clamped.
        flags += [("--glu-linear-offset", "1.0"), ("--quick-geglu", "")]
        flags.append(("--activation-func-clamp-value", str(config.number("swiglu_limit"))))
    return flags + router_flags(config)
