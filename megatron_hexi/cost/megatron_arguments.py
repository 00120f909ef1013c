"""A model, and the job to train it, as Megatron's own arguments state them in a text file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_hexi.argument_file import split_words
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


@dataclass(frozen=True)
class ArgumentTerms:
    """What a file of Megatron's arguments says of the job, besides the model.

    Args:
        fields: values of `Job`'s fields.
        unread: flags that neither the model nor these fields follow from.
    """

    fields: Mapping[str, Any]
    unread: Sequence[str]


def model_from_arguments(text: str, path: Path) -> Model:
    """The model of a file of Megatron's arguments.

    Defaults are Megatron's: an MLP of 4 x hidden (8/3 x hidden, down to a multiple of 64, with --swiglu),
    biases, learned positions, tied embeddings.

    Raises:
        HexiError: a flag is missing, has no usable value, or asks for a shape that is not supported.
    """
    known, _ = _parse(text, path)
    for flag in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(known, flag) is None:
            raise HexiError(f"{path}: --{flag.replace('_', '-')} is missing; add it")
    return _model(known, path)


def terms_from_arguments(text: str, path: Path) -> ArgumentTerms:
    """The job of a file of Megatron's arguments, as far as `Job` has fields for it.

    A file with --seq-length states a job: what it leaves out is as Megatron has it by default (fp32, no
    distributed optimizer), but for sizes and recomputation, which a plan brings with it. One without states a
    model, and what it leaves out stays open.

    Raises:
        HexiError: a flag has no usable value, or two contradict each other.
    """
    known, rest = _parse(text, path)
    if known.bf16 and known.fp16:
        raise HexiError(f"{path}: --bf16 and --fp16; leave one of them out")
    recompute = "selective" if known.recompute_activations else known.recompute_granularity
    hidden = known.overlap_grad_reduce and (known.overlap_param_gather or not known.use_distributed_optimizer)
    terms = {
        "seq_length": known.seq_length,
        "micro_batch_size": known.micro_batch_size,
        "global_batch_size": known.global_batch_size,
        "tensor_parallel": known.tensor_model_parallel_size,
        "pipeline_parallel": known.pipeline_model_parallel_size,
        "recompute": recompute,
        "precision": "bf16" if known.bf16 else "fp16" if known.fp16 else None,
        "distributed_optimizer": known.use_distributed_optimizer or None,
        "overlap_gradients": hidden or None,
        "sequence_parallel": known.sequence_parallel or None,
    }
    stated = {field: value for field, value in terms.items() if value is not None}
    if known.seq_length is not None:
        stated = _MEGATRON_DEFAULTS | stated
    return ArgumentTerms(stated, tuple(dict.fromkeys(word.partition("=")[0] for word in rest)))


#: Of Megatron's arguments that no plan chooses; the batch has none.
_MEGATRON_DEFAULTS = {
    "precision": "fp32",
    "distributed_optimizer": False,
    "overlap_gradients": False,
    "sequence_parallel": False,
}


def _parse(text: str, path: Path) -> tuple[argparse.Namespace, list[str]]:
    """The flags that something follows from, and the others."""
    words = split_words(text, path)
    if not any(word.startswith("--") for word in words):
        raise HexiError(f"{path}: no arguments in it; write Megatron's, for example --num-layers 32")
    known, rest = _parser(path).parse_known_args(words)
    flags = [word for word in rest if word.startswith("--")]
    for word in flags:
        flag = word.partition("=")[0]
        for refused, what in _REFUSED.items():
            if flag == refused or (refused.endswith("-") and flag.startswith(refused)):
                raise HexiError(f"{path}: {flag}: {what} is not supported; give a dense model")
    return known, flags


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


def model_flags(model: Model, seq_length: int) -> list[str]:
    """Return Megatron's flags for a model: what `model_from_arguments` reads, and what its family implies.

    Args:
        model: its shapes. Constants that they leave open (--norm-epsilon, --rotary-base) are Megatron's.
        seq_length: positions that are allowed, where they are not learned.
    """
    sizes = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--vocab-size": model.vocab_size,
        "--max-position-embeddings": model.learned_positions or seq_length,
        "--position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    flags = [word for flag, value in sizes.items() for word in (flag, str(value))]
    if model.kv_heads < model.heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    if model.gated:
        flags.append("--swiglu")
    if not model.biases:
        flags.append("--disable-bias-linear")
    if model.norm_params(1) == 1:
        flags += ["--normalization", "RMSNorm"]
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.qk_norm:
        flags.append("--qk-layernorm")
    return flags


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
        "seq-length",
        "micro-batch-size",
        "global-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "group-query-attention",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
        "qk-layernorm",
        "bf16",
        "fp16",
        "recompute-activations",
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "sequence-parallel",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--recompute-granularity", choices=("selective", "full"))
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as one of our errors, and takes no shortened flags."""

    def __init__(self, path: Path) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._path = path

    def error(self, message: str) -> NoReturn:
        raise HexiError(f"{self._path}: {message}; correct that flag")
