"""Models as Megatron's own arguments describe them: the words of a launch script in a text file."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import NoReturn

from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError

#: Flags (and beginnings of flags) that change shapes in a way that is not supported.
_REFUSED = {
    "--num-experts": "mixture of experts",
    "--moe-": "mixture of experts",
    "--expert-model-parallel-size": "mixture of experts",
    "--multi-latent-attention": "multi-latent attention",
    "--kv-lora-rank": "multi-latent attention",
    "--window-size": "attention in a window",
    "--heterogeneous-layers-config-": "layers that differ",
    "--hybrid-": "a hybrid model",
    "--is-hybrid-model": "a hybrid model",
    "--mtp-num-layers": "multi-token prediction",
    "--experimental-attention-variant": "another attention",
}


def model_from_arguments(text: str, path: Path) -> Model:
    """The model of a file of Megatron's arguments, on one line or several, with ``#`` comments.

    Defaults are Megatron's: an MLP of 4 x hidden (8/3 x hidden, down to a multiple of 64, with --swiglu),
    biases, learned positions, tied embeddings. Flags that say nothing of shapes are passed over.

    Raises:
        HexiError: a flag is missing, has no usable value, or asks for a shape that is not supported.
    """
    try:
        # A backslash at the end of a line joins it to the next one, as in a shell.
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as problem:
        raise HexiError(f"{path}: cannot be split into words ({problem}); mend the quotes") from None
    if not any(word.startswith("--") for word in words):
        raise HexiError(f"{path}: no arguments in it; write Megatron's, for example --num-layers 32")
    parser = _parser(path)
    known, rest = parser.parse_known_args(words)
    for word in rest:
        flag = word.partition("=")[0]
        for refused, what in _REFUSED.items():
            if flag == refused or (refused.endswith("-") and flag.startswith(refused)):
                raise HexiError(f"{path}: {flag}: {what} is not supported; give a dense model")
    for flag in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(known, flag) is None:
            raise HexiError(f"{path}: --{flag.replace('_', '-')} is missing; add it")
    return _model(known, path)


def _model(known: argparse.Namespace, path: Path) -> Model:
    hidden, heads = known.hidden_size, known.num_attention_heads
    if known.kv_channels is None and (heads < 1 or hidden % heads):
        raise HexiError(
            f"{path}: --num-attention-heads {heads} does not divide --hidden-size {hidden}; add --kv-channels"
        )
    if known.group_query_attention and known.num_query_groups is None:
        raise HexiError(f"{path}: --group-query-attention without --num-query-groups; add it")
    learned = known.position_embedding_type == "learned_absolute"
    if learned and known.max_position_embeddings is None:
        raise HexiError(
            f"{path}: --max-position-embeddings is missing; add it, or --position-embedding-type rope"
        )
    ffn = known.ffn_hidden_size
    if ffn is None:  # as Megatron: of a gated MLP two thirds, in whole multiples of 64
        ffn = 8 * hidden // (3 * 64) * 64 if known.swiglu else 4 * hidden
    return Model(
        name=str(path),
        layers=known.num_layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=known.num_query_groups if known.group_query_attention else heads,
        head_dim=hidden // heads if known.kv_channels is None else known.kv_channels,
        ffn_hidden_size=ffn,
        gated=known.swiglu,
        vocab_size=known.vocab_size,
        tied_embeddings=not known.untie_embeddings_and_output_weights,
        biases=not known.disable_bias_linear,
        qk_norm=known.qk_layernorm,
        learned_positions=known.max_position_embeddings if learned else 0,
        source=str(path),
    )


def _parser(path: Path) -> argparse.ArgumentParser:
    parser = _Parser(path)
    for name in (
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "kv-channels",
        "num-query-groups",
        "vocab-size",
        "max-position-embeddings",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "group-query-attention",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
        "qk-layernorm",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as one of our errors, and takes no shortened flags."""

    def __init__(self, path: Path) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._path = path

    def error(self, message: str) -> NoReturn:
        raise HexiError(f"{self._path}: {message}; mend that flag")
