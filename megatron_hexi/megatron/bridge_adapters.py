"""Adapters of Megatron Bridge under a plan: LoRA and DoRA on frozen weights."""

from __future__ import annotations

from typing import Any, Final

from megatron_hexi.errors import HexiError
from megatron_hexi.options.kinds import DRAWS

#: Adapters that are whole on each rank of a domain, as the weights beside them.
_KINDS: Final = ("LoRA", "DoRA", "CanonicalLoRA")
#: Layers of which experts have their own.
_OF_EXPERTS: Final = ("linear_fc1", "linear_fc1_up", "linear_fc1_gate", "linear_fc2")
_SETTINGS: Final = (
    ("dropout", 0.0, f"{DRAWS}; give 0"),
    ("a2a_experimental", False, "it exchanges equal parts of a sequence; give False"),
)


def refuse_adapters(peft: Any, model: Any) -> None:
    """Refuse adapters that do not train under a plan.

    Args:
        peft: Bridge's configuration of adapters; ``None``: all weights are trained.
        model: the model's configuration.

    Raises:
        HexiError: a setting is not supported; the message has its value and a remedy.
    """
    if peft is None:
        return
    kind = type(peft).__name__
    if kind not in _KINDS:
        raise HexiError(f"peft {kind}: a plan trains {', '.join(_KINDS)}; give one of them")
    for name, allowed, remedy in _SETTINGS:
        value = getattr(peft, name, allowed)
        if value != allowed:
            raise HexiError(f"peft.{name} {value}: {remedy}")
    targets = [name for name in peft.target_modules or ("*",) if name.endswith(("*", *_OF_EXPERTS))]
    if model.num_moe_experts is not None and targets:
        raise HexiError(
            f"peft.target_modules {targets[0]}: experts hold this layer, whose adapters do not train under a "
            "plan yet; give target_modules=['linear_qkv', 'linear_proj']"
        )
