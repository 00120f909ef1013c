"""The constants of a Hugging Face model that its shapes leave open, and Megatron's flags for them."""

from __future__ import annotations

from megatron_hexi.cost.hugging_face_config import Config
from megatron_hexi.cost.hugging_face_rotary import NoFlagError, rotary_flags

__all__ = ["NoFlagError", "constants_of"]

#: Standard deviation of fresh weights without --init-method-std.
_INIT_STD = 0.02
#: GPT-2's activations, with the flags that make Megatron compute the same. Its fused kernel has the tanh
#: approximation (megatron/core/fusions/fused_bias_gelu.py), what it takes without has the error function.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ()),
    "gelu": (("--no-bias-gelu-fusion", ""),),
}


def constants_of(config: Config) -> list[tuple[str, str]]:
    """Megatron's flags for the constants of a config.json, each with its value; empty where it takes none.

    Raises:
        HexiError: a value that is not usable.
        NoFlagError: a value that Megatron has no flag for; with file, field and remedy.
    """
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
    return flags
