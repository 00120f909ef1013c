"""Read the kinds of a model's layers from Megatron's arguments."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import STATES, DeltaNet, Experts, Latent, ShortConv, Window
from megatron_hexi.kinds.layer_list import layers_of
from megatron_hexi.kinds.states import hybrid_layers


def layer_features(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields of `megatron_hexi.models.Model` that describe the kinds of a model's layers.

    Raises:
        HexiError: a pattern does not fit the model's number of layers, or latent attention has weights that
            the cost model does not count.
    """
    if hybrid_layers(args):
        return _hybrid(args, source)
    # Layers without rotary positions cost what others do: the option is checked alone.
    layers_of(args, "--no-rope-freq", source, lambda layer, step: (layer + 1) % step == 0)
    found = {
        "experts": Experts.from_arguments(args, source),
        "state": DeltaNet.in_gpt(args, source),
        "window": Window.from_arguments(args, source),
        "latent": Latent.from_arguments(args, source),
        "mtp_layers": getattr(args, "mtp_num_layers", None) or 0,
    }
    return {name: value for name, value in found.items() if value}


def layers_by_state(args: Namespace, source: str) -> tuple[bool, ...]:
    """Return for each layer of the model whether a state passes along the sequence.

    Raises:
        HexiError: the pattern of delta nets does not fit the model's number of layers.
    """
    pattern = hybrid_layers(args).replace("|", "")
    if pattern:
        return tuple(letter in STATES for letter in pattern)
    state = DeltaNet.in_gpt(args, source)
    return (False,) * (args.num_layers or 0) if state is None else state["layers"]


def query_size(args: Namespace) -> int:
    """Return the size of one head's query, which equals the size of one head's key."""
    if args.multi_latent_attention:
        return int(args.qk_head_dim + args.qk_pos_emb_head_dim)
    return int(args.kv_channels)


def _hybrid(args: Namespace, source: str) -> dict[str, Any]:
    """Return the fields that a pattern of layers gives; its letters have passed the rules of options.

    Raises:
        HexiError: the pattern has states of two kinds, or other options describe layers too.
    """
    flag, letters = "--hybrid-layer-pattern", hybrid_layers(args).replace("|", "")
    beside = {
        "--mtp-num-layers": bool(args.mtp_num_layers),
        "--window-size": bool(args.window_size),
        "--multi-latent-attention": args.multi_latent_attention,
    }
    for other, is_given in beside.items():
        if is_given:
            raise HexiError(f"{source}: {flag} with {other} is not read; leave {other} out")
    states = [letter for letter in STATES if letter in letters]
    if len(states) > 1:
        raise HexiError(
            f"{source}: {flag} with {' and '.join(sorted(states, reverse=True))} is not read: states of one "
            "kind are; use one of them"
        )
    found: dict[str, Any] = {"pattern": letters}
    if states:
        found["state"] = STATES[states[0]].from_arguments(args, source)
    if ShortConv.letter in letters:
        found["short_conv"] = ShortConv.from_arguments(args)
    if args.num_experts:
        found["experts"] = Experts.routed(args)
    return found
