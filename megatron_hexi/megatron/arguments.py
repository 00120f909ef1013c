"""The argument group ``hexi`` in Megatron's command line, and the checks after parsing."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.megatron.folders import check_folders
from megatron_hexi.megatron.kernel_choice import kernel_choice
from megatron_hexi.megatron.metrics import check_metrics
from megatron_hexi.megatron.plan_arguments import check_interleaving, set_terms, take_plan
from megatron_hexi.megatron.session import given_plan
from megatron_hexi.megatron.stages.stage_arguments import as_one_rank
from megatron_hexi.options.refusals import refuse_yaml_configuration
from megatron_hexi.options.registry import nearest_option
from megatron_hexi.patching import Patch, patched
from megatron_hexi.platform import Platform, adjust_cpu_arguments
from megatron_hexi.platform.select import PLATFORM_FLAG, PLATFORM_NAMES, say
from megatron_hexi.runtime import KERNEL_NAMES

#: What Megatron's checks raise, and what their arithmetic does with numbers that they did not expect.
_REFUSALS = (AssertionError, ValueError, NotImplementedError, ArithmeticError, LookupError, TypeError)


def argument_patches(platform: Platform) -> tuple[Patch, ...]:
    """Return the patches that add our flags and check them."""
    return (
        Patch(
            target="megatron.training.arguments:add_megatron_arguments",
            why="adds the argument group hexi",
            build=_with_hexi_arguments,
            parameters=("parser",),
        ),
        Patch(
            target="megatron.training.arguments:validate_args",
            why="fits Megatron's arguments to the platform, and checks ours",
            build=functools.partial(_with_hexi_checks, platform=platform),
            parameters=("args", "defaults"),
        ),
        _configure,
    )


def add_hexi_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the argument group ``hexi`` to a parser."""
    group = parser.add_argument_group("hexi", "uneven context x head parallelism")
    group.add_argument("--hexi-plan", metavar="PATH", help="train under this plan")
    group.add_argument(
        PLATFORM_FLAG,
        choices=PLATFORM_NAMES,
        default="auto",
        help="where to train; auto (default): on the GPU where there is one, else on the CPU with gloo",
    )
    group.add_argument(
        "--hexi-kernel",
        type=kernel_choice,
        default="auto",
        metavar="NAME|GPU=NAME,…",
        help="the attention kernel of a plan, or one for each kind of GPU (H100=cudnn,A100=flash-attn-2): "
        f"{', '.join(KERNEL_NAMES[1:])}; auto (default): the plan's kernel if it is installed, else "
        "the fastest installed one that supports the model",
    )
    group.add_argument(
        "--hexi-batch-shares",
        action="store_true",
        help="assign documents, tokens and heads again for every batch, by the rates that hexi plan "
        "--batch-shares wrote into the plan; needs --dataloader-inter-document-masking or --sft",
    )
    group.add_argument(
        "--hexi-metrics",
        metavar="PATH",
        help="write one JSON line per iteration: loss, gradient norm, learning rate, seconds, processor "
        "seconds; with {rank} in PATH every rank writes its own file",
    )
    group.add_argument(
        "--hexi-metrics-interval",
        type=int,
        metavar="N",
        help="measure how long ranks wait in every N-th iteration; default: as often as costs less than a "
        "thousandth of the time",
    )
    group.add_argument(
        "--hexi-record",
        metavar="PATH",
        help="write each iteration's seconds and loss, and each rank's busy and waiting time, for hexi "
        "report; a restarted job appends",
    )
    group.add_argument(
        "--hexi-replan-interval",
        type=int,
        metavar="N",
        help="every N iterations, divide tokens, heads and samples again by the ranks' present speeds if "
        "that saves time; needs --hexi-cluster; default: never",
    )
    group.add_argument(
        "--hexi-replan-threshold",
        type=float,
        default=0.03,
        metavar="RATIO",
        help="least part of an iteration that a new division must save, as predicted (default: 0.03)",
    )
    group.add_argument(
        "--hexi-cluster",
        metavar="PATH",
        help="the cluster file that the plan was made for, for re-planning and megatron_hexi.elastic",
    )
    return parser


def prepare_arguments(args: Namespace, given: set[str], platform: Platform) -> None:
    """Adapt Megatron's parsed arguments to the platform, before Megatron checks them.

    Args:
        args: Megatron's arguments; changed in place.

    Raises:
        HexiError: the arguments cannot be carried out.
    """
    if platform.name == "cpu":
        changed = adjust_cpu_arguments(args, given)
        if changed:
            say(f"on the CPU, Megatron's defaults are replaced by: {' '.join(changed)}")
    check_metrics(args)
    check_folders(args)
    held = take_plan(args, given, platform.device)
    if held.added:
        say(f"the plan needs, and sets: {' '.join(held.added)}")
    for line in held.replaced:
        say(f"replaced by the plan: {line}")
    order_communication(args)


def order_communication(args: Namespace) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS as Megatron needs it before Blackwell, where it is unset.

    Sharded data parallelism needs the opposite, and Megatron checks that itself.
    """
    parallel = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if parallel and not (args.use_torch_fsdp2 or args.use_megatron_fsdp):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _with_hexi_arguments(original: Callable[[ArgumentParser], Any]) -> Callable[[ArgumentParser], Any]:
    @functools.cache
    def options() -> ArgumentParser:
        return add_hexi_arguments(original(ArgumentParser(add_help=False)))

    @functools.wraps(original)
    def add_megatron_arguments(parser: ArgumentParser) -> Any:
        with user_errors():
            refuse_yaml_configuration(sys.argv)
        # As by `parents=`. To make 800 options takes 90 ms, and each rank parses its arguments three times.
        parser._add_container_actions(options())
        parser.error = _refuse_words  # type: ignore[method-assign]
        return parser

    return add_megatron_arguments


def _refuse_words(message: str) -> NoReturn:
    """Replace `ArgumentParser.error`, which prints two thousand lines of usage first."""
    with user_errors():
        wrong = re.findall(r"(?<!\S)--[\w-]+", message) if message.startswith("unrecognized") else []
        near = [close for word in wrong if (close := nearest_option(word))]
        hint = f"did you mean {' '.join(near)}? " if near else ""
        raise HexiError(f"{' '.join(message.split())}; {hint}--help lists all options")
    raise AssertionError  # user_errors ends the process


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn what Megatron's checks raise under a plan into one line with Megatron's words.

    Without a plan the job is Megatron's own, and keeps its traceback.

    Raises:
        HexiError: Megatron refuses the arguments.
    """
    try:
        yield
    except _REFUSALS as problem:
        if given_plan() is None or isinstance(problem, HexiError):
            raise
        check = traceback.extract_tb(problem.__traceback__)[-1].line
        said = " ".join(str(problem).split())
        if not isinstance(problem, (AssertionError, ValueError, NotImplementedError)):  # numbers, no words
            said = f"{type(problem).__name__} {said} in {check}"
        raise HexiError(f"Megatron refuses the arguments: {said or check}; correct them") from None


@patched(
    "megatron.training.arguments:core_transformer_config_from_args",
    why="says in one line what Megatron refuses of a model",
)
def _configure(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the model's configuration, whose checks come after those of the arguments."""
    with user_errors(), _refusals():
        return original(*args, **kwargs)


def _with_hexi_checks(original: Callable[..., Any], platform: Platform) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006 (Megatron's own)
        with user_errors():
            given = {word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")}
            prepare_arguments(args, given, platform)
        plan = given_plan()
        with user_errors():
            with as_one_rank(args, plan.mesh if plan else None), _refusals():
                validated = original(args, defaults)
            check_interleaving(validated)
            set_terms(validated)
        return validated

    return validate_args
