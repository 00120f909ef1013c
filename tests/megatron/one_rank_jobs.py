"""Jobs of one rank: the flags that `hexi launch` prints, and what Megatron's own checks say of them."""

from __future__ import annotations

import contextlib
import io
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.training import argument_utils, arguments

from megatron_hexi.argument_file import located_words
from megatron_hexi.megatron.arguments import add_hexi_arguments
from megatron_hexi.models.megatron_arguments import model_from_arguments, terms_from_arguments
from megatron_hexi.options.plan_job import hold_job
from megatron_hexi.plan import read_plan
from megatron_hexi.report.launch_lines import megatron_flags

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


def printed_flags(words: str, folder: Path) -> tuple[str, ...]:
    """Return the flags of one rank that ``hexi launch`` prints for a file of these words.

    Raises:
        HexiError: the words are refused.
    """
    path = Path("job.args")
    located = located_words(words, path)
    model, terms = model_from_arguments(located, path), terms_from_arguments(located, path)
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
    return megatron_flags([word.text for word in located], [], read_plan(plan), str(plan))


def refused_by_megatron(flags: Sequence[str], parser: ArgumentParser, held: bool = True) -> str:
    """Return what Megatron's own checks say against flags of one rank; empty where they pass.

    What fails for want of a file does not count, and with `held` nor does what is missing on this machine.

    Args:
        flags: the flags.
        parser: see `megatron_parser`.
        held: whether a plan's checks go before, and set what the plan decides. Else there are as many ranks
            as the flags ask for.
    """
    try:
        with _quiet():
            args = parser.parse_args(list(flags))
            args.rank = args.local_rank = 0
            args.world_size = 1 if held else _asked_ranks(args)
            if held:
                given = {word.partition("=")[0] for word in flags if word.startswith("--")}
                hold_job(args, given, read_plan(args.hexi_plan))
            arguments.validate_args(args)
            args.padded_vocab_size = args.padded_vocab_size or args.vocab_size
            hybrid = args.hybrid_layer_pattern is not None
            (argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args)(args)
    except OSError:  # a file of these words
        return ""
    except (Exception, SystemExit) as problem:  # whatever the checks raise
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        return "" if held and is_missing_here(said) else said
    return ""


def is_missing_here(said: str) -> bool:
    """Return whether Megatron tells of a package or a device that this machine lacks."""
    return any(word in said for word in _NOT_HERE)


def _asked_ranks(args: Namespace) -> int:
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    width = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = width * args.expert_model_parallel_size
    return max(1, args.pipeline_model_parallel_size * max(dense, experts))


def megatron_parser() -> ArgumentParser:
    """Return Megatron's own parser, with the plan's options."""

    class Parser(ArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            raise ValueError(message)

    parser: ArgumentParser = add_hexi_arguments(arguments.add_megatron_arguments(Parser(allow_abbrev=False)))
    return parser


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
