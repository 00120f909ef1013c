"""Options of Megatron beside a plan: each is either carried out, as a test shows, or refused by name.

`OPTIONS` is the one list that the checks, the documentation (docs/options.md) and the tests read. An option
that meets context parallelism and stands in neither part of it is a mistake.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.options import attention, experts, parallelism, replicas, stages, training
from megatron_hexi.megatron.options.kinds import PlanKind, Refused, Supported
from megatron_hexi.patching import is_installed

#: Every option that meets context parallelism, by what it is about.
OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    **attention.OPTIONS,
    **parallelism.OPTIONS,
    **replicas.OPTIONS,
    **stages.OPTIONS,
    **training.OPTIONS,
    **experts.OPTIONS,
}


def supported() -> list[Supported]:
    """All that a plan carries out."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Supported)]


def refused() -> list[Refused]:
    """All that is refused."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Refused)]


def refuse_yaml_configuration(argv: Sequence[str]) -> None:
    """Refuse ``--yaml-cfg`` beside a plan, before Megatron parses: it drops every flag, ours too.

    Raises:
        PlanError: both are on the command line.
    """
    flags = {word.partition("=")[0] for word in argv}
    if {"--yaml-cfg", "--hexi-plan"} <= flags:
        raise PlanError(
            "--yaml-cfg does not work with --hexi-plan: it replaces the command line that a plan is checked "
            "against; give flags"
        )


def refuse_unsupported(args: Namespace, plan: PlanKind) -> None:
    """Refuse the first option of the job that a plan does not carry out.

    Args:
        args: Megatron's arguments.
        plan: what is special about the plan.

    Raises:
        PlanError: with the option, the reason and the remedy.
    """
    kinds: dict[PlanKind, tuple[PlanKind, ...]] = {
        "any": ("any",),
        "unequal": ("any", "unequal"),
        "stages": ("stages", "any", "unequal"),
    }
    for option in sorted(refused(), key=lambda option: option.beside != plan):
        applies = option.beside in kinds[plan] and (not option.versions or is_installed(option.versions))
        if applies and option.used(args):
            raise PlanError(
                f"{option.option} does not work with {option.what}: {option.reason}; {option.remedy}"
            )
