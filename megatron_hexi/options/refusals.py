"""The rules of all options by topic; replace or refuse the options of a job by them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_hexi.errors import PlanError, raise_all
from megatron_hexi.options import (
    rules_attention,
    rules_experts,
    rules_megatron,
    rules_parallelism,
    rules_planning,
    rules_replaced,
    rules_training,
)
from megatron_hexi.options.kinds import PlanKind, Refused, Replaced, Supported
from megatron_hexi.options.parser import is_assumed

OPTIONS: dict[str, tuple[Supported | Replaced | Refused, ...]] = {
    **rules_replaced.OPTIONS,
    **rules_attention.OPTIONS,
    **rules_parallelism.OPTIONS,
    **rules_training.OPTIONS,
    **rules_experts.OPTIONS,
    **rules_planning.OPTIONS,
    **rules_megatron.OPTIONS,
}


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


def find_refused(args: Namespace, plan: PlanKind, name: str | None = None) -> list[Refused]:
    """Return the rules that refuse options of a job, or the named one, with a plan of this kind.

    Those of its own kind are first.
    """
    return [
        option
        for option in sorted(refused(), key=lambda option: option.beside != plan)
        if option.beside in _KINDS[plan]
        and name in (None, option.option)
        and (not option.versions or is_assumed(option.versions))
        and option.used(args)
    ]


def replaced() -> list[Replaced]:
    """Return all rules that replace an option."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Replaced)]


def replace_options(args: Namespace, plan: PlanKind) -> list[str]:
    """Replace the options that a plan of this kind carries out in its own way; return a line for each.

    Args:
        args: Megatron's arguments, before Megatron's own checks; changed in place.
    """
    rules = [rule for rule in replaced() if rule.beside in _KINDS[plan]]
    return [rule.apply(args) for rule in rules if rule.applies_to(args)]


def refuse_unsupported(args: Namespace, plan: PlanKind) -> None:
    """Refuse a job with options that a plan of this kind does not support."""
    raise_all([option.message for option in find_refused(args, plan)], PlanError)


def refuse_yaml_configuration(argv: Sequence[str]) -> None:
    """Refuse ``--yaml-cfg`` with a plan, before Megatron parses and drops every other flag."""
    flags = {word.partition("=")[0] for word in argv}
    if {"--yaml-cfg", "--hexi-plan"} <= flags:
        raise PlanError(
            "--yaml-cfg does not work with --hexi-plan: it replaces the command line that a plan is checked "
            "against; give flags"
        )
