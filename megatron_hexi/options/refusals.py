"""Find and refuse the options of a job that a plan does not support."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_hexi.errors import PlanError
from megatron_hexi.options.kinds import PlanKind, Refused
from megatron_hexi.options.release import is_assumed
from megatron_hexi.options.rule_table import OPTIONS

#: Kinds of rules (`Refused.beside`) that apply to each kind of plan.
_KINDS: dict[PlanKind, tuple[PlanKind, ...]] = {
    "any": ("any",),
    "unequal": ("any", "unequal", "repeated"),
    "repeated": ("repeated",),
    "stages": ("stages", "any", "unequal"),
    "planned": ("any", "planned", "script"),
    "script": ("script",),
}


def refused() -> list[Refused]:
    """Return all rules that refuse an option."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Refused)]


def find_refused(args: Namespace, plan: PlanKind) -> Refused | None:
    """Return the first rule that refuses an option of a job with a plan of this kind, or ``None``.

    Args:
        args: Megatron's arguments.
        plan: the kind of plan.
    """
    for option in sorted(refused(), key=lambda option: option.beside != plan):
        applies = option.beside in _KINDS[plan] and (not option.versions or is_assumed(option.versions))
        if applies and option.used(args):
            return option
    return None


def refuse_unsupported(args: Namespace, plan: PlanKind) -> None:
    """Refuse a job with an option that a plan of this kind does not support.

    Args:
        args: Megatron's arguments.
        plan: the kind of plan.

    Raises:
        PlanError: the job has such an option; the message has the option, the reason and the remedy.
    """
    option = find_refused(args, plan)
    if option is not None:
        raise PlanError(option.message)


def refuse_yaml_configuration(argv: Sequence[str]) -> None:
    """Refuse ``--yaml-cfg`` with a plan, before Megatron parses and drops every other flag.

    Raises:
        PlanError: the command line has both options.
    """
    flags = {word.partition("=")[0] for word in argv}
    if {"--yaml-cfg", "--hexi-plan"} <= flags:
        raise PlanError(
            "--yaml-cfg does not work with --hexi-plan: it replaces the command line that a plan is checked "
            "against; give flags"
        )
