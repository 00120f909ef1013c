"""Jobs of one rank: the flags that `hexi launch` prints, and what Megatron's own checks say of them."""

from __future__ import annotations

import contextlib
import io
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.training import argument_utils, arguments

from megatron_hexi.argument_file import split_words
from megatron_hexi.cost.megatron_arguments import model_from_arguments, terms_from_arguments
from megatron_hexi.megatron.arguments import add_hexi_arguments
from megatron_hexi.options.parser import Row, read_rows
from megatron_hexi.options.plan_job import hold_job
from megatron_hexi.options.registry import class_of
from megatron_hexi.plan import read_plan
from megatron_hexi.report.launch_lines import megatron_flags

_JOB = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --normalization RMSNorm "
    "--vocab-size 128 --attention-dropout 0 --hidden-dropout 0 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-4 --train-iters 10 --max-position-embeddings 64 --mock-data "
    "--tokenizer-type NullTokenizer --no-rope-fusion --bf16"
)
_ROTARY = f"{_JOB} --disable-bias-linear --swiglu --position-embedding-type rope"
#: Words of jobs, by the kind of model.
JOBS = {
    "rotary": _ROTARY,
    "learned": _JOB,
    "experts": f"{_ROTARY} --num-experts 8 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-topk 2",
    "latent": f"{_ROTARY} --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8",
    "hybrid": f"{_JOB} --disable-bias-linear --squared-relu --position-embedding-type none "
    "--hybrid-layer-pattern M*-M --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 16",
    "delta": f"{_ROTARY} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "multi-token": f"{_ROTARY} --mtp-num-layers 1",
}
_PLAN = """\
version: 2
workload: {{seq_length: {seq}, heads: {heads}, kv_heads: {kv}, head_dim: {dim}, layers: {layers}{value}}}
replicas:
- {{micro_batches: 4, stages: [{{layers: [0, {layers}], domains: [{{ranks: [0]}}]}}]}}
"""
#: What is missing on this machine, or a device's own.
_NOT_HERE = (
    "Transformer Engine",
    "TransformerEngine",
    "transformer-engine",
    "TE >=",
    "TE version",
    "install",
    "CUDA",
)
_VALUES = {
    "int": "0 1 2 3 8",
    "float": "0 0.5 2.0",
    "pair": "16,0",
    "pattern": "2 [1]*2+[0]*2",
    "bool": "true",
    "name": "local",
}


def printed_flags(words: str, folder: Path) -> tuple[str, ...]:
    """Return the flags of one rank that ``hexi launch`` prints for a file of these words.

    Raises:
        HexiError: the words are refused.
    """
    path = Path("job.args")
    model, terms = model_from_arguments(words, path), terms_from_arguments(words, path)
    value = "" if model.latent is None else f", value_dim: {model.latent.value_dim}"
    plan = folder / "plan.yaml"
    plan.write_text(
        _PLAN.format(
            seq=terms.fields.get("seq_length", 64),
            heads=model.heads,
            kv=model.kv_heads,
            dim=model.head_dim,
            layers=model.layers,
            value=value,
        )
    )
    return megatron_flags(split_words(words, path), [], read_plan(plan), str(plan))


def refused_by_megatron(flags: Sequence[str], parser: ArgumentParser, held: bool = True) -> str:
    """Return what Megatron's own checks say against flags of one rank; empty where they pass.

    Args:
        flags: the flags.
        parser: see `megatron_parser`.
        held: whether a plan's checks go before, and set what the plan decides; what fails for want of a
            package does not count then.
    """
    try:
        with _quiet():
            args = parser.parse_args(list(flags))
            args.rank = args.local_rank = 0
            args.world_size = 1
            if held:
                given = {word.partition("=")[0] for word in flags if word.startswith("--")}
                hold_job(args, given, read_plan(args.hexi_plan))
            arguments.validate_args(args)
            args.padded_vocab_size = args.padded_vocab_size or args.vocab_size
            hybrid = args.hybrid_layer_pattern is not None
            (argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args)(args)
    except OSError:  # a file of these words
        return ""
    except Exception as problem:  # whatever the checks raise
        said = f"{type(problem).__name__}: {problem}"
        return "" if held and any(word in said for word in _NOT_HERE) else said
    return ""


def megatron_parser() -> ArgumentParser:
    """Return Megatron's own parser, with the plan's options."""

    class Parser(ArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            raise ValueError(message)

    parser: ArgumentParser = add_hexi_arguments(arguments.add_megatron_arguments(Parser(allow_abbrev=False)))
    return parser


def choices() -> list[tuple[str, ...]]:
    """Return words that set each option of Megatron that plans may train with, each to several values."""
    rows = [row for row in read_rows() if "0.19" in row.versions]
    allowed = [row for row in rows if not any(class_of(flag) == "refused" for flag in row.flags)]
    return [words for row in allowed for words in _settings(row)]


def _settings(row: Row) -> Iterator[tuple[str, ...]]:
    flag = row.flags[0]
    if row.kind in ("true", "false", "both"):
        yield (flag,)
        yield from ((spelling,) for spelling in row.flags[1:] if spelling.startswith("--no-"))
        return
    values = row.choices or _VALUES.get(row.type, "x").split()
    for value in values:
        yield (flag, *([str(value)] * (row.nargs if isinstance(row.nargs, int) else 1)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    capability = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.cuda.get_device_capability = capability
