"""The registry of kinds with a state, and which of a job's layers have one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.kinds.delta_net import DeltaNet
from megatron_hexi.kinds.mamba import Mamba
from megatron_hexi.kinds.state import State
from megatron_hexi.yaml_schema import short

#: Kinds of layers that pass a state along the sequence, by their letter in --hybrid-layer-pattern.
STATES: Mapping[str, type[State]] = {kind.letter: kind for kind in (Mamba, DeltaNet)}


def state_of(value: State | Mapping[str, Any] | None) -> State | None:
    """Return a state, from the object or from its fields, among them ``kind``.

    Raises:
        HexiError: a kind that is not known, or sizes that `State` refuses.
    """
    if not isinstance(value, Mapping):
        return value
    known = {kind.kind: kind for kind in STATES.values()}
    fields = dict(value)
    name = fields.pop("kind", None)
    if name not in known:
        raise HexiError(f"state: kind = {short(name)}; write {' or '.join(known)}")
    return known[name](**fields)


def hybrid_layers(args: Namespace) -> str:
    """Return the pattern of a hybrid model's layers; empty for other models."""
    return getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""


def layers_with_state(args: Namespace) -> str:
    """Return the letters of the model's layers that pass a state along the sequence.

    They are those of the pattern, or of a GPT's ``--experimental-attention-variant``.
    """
    is_variant = getattr(args, "experimental_attention_variant", None) == "gated_delta_net"
    return "".join(sorted(set(hybrid_layers(args) or DeltaNet.letter * is_variant) & set(STATES)))


def state_option(args: Namespace) -> str:
    """Return the option that gives a model its layers with a state (`layers_with_state`)."""
    return "--hybrid-layer-pattern" if hybrid_layers(args) else "--experimental-attention-variant"


def check_state_heads(args: Namespace, source: str, letter: str, width: int, asked: str) -> None:
    """Check that heads with a state divide among `width` ranks; Megatron checks this with `assert`.

    Args:
        asked: text for `width` in error messages.

    Raises:
        PlanError: groups that do not divide the heads, or a width that does not divide both.
    """
    kind = STATES[letter]
    sizes = kind.from_arguments(args, source)
    groups, heads = ((kind.flag_of[name], sizes[name]) for name in ("groups", "heads"))
    if heads[1] % groups[1]:
        raise PlanError(
            f"{groups[0]} {groups[1]} does not divide {heads[0]} {heads[1]}; give a {groups[0]} "
            f"that divides {heads[1]}"
        )
    for flag, count in (groups, heads):
        if count % width:
            raise PlanError(f"{asked} does not divide {flag} {count}; plan with a size that does")
