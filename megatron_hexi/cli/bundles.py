"""Bundles of options that a command takes as one parameter, such as the features that plans may use."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import typer

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import spell_flag


class Bundle:
    """Options that a command takes as one parameter, a dataclass."""

    #: How the help of an option ends, by field: what holds where the option is not given.
    otherwise: ClassVar[Mapping[str, str]] = {}


def with_bundles[R](command: Callable[..., R]) -> Callable[..., R]:
    """Expand each `Bundle` parameter (a dataclass of options) into one keyword per field, for Typer."""
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Bundle)
    }

    @functools.wraps(command)
    def call(**values: Any) -> R:
        for name, kind in kinds.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _fields(kinds[name]) if name in kinds else [parameter]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return call


def _fields(kind: type[Any]) -> list[inspect.Parameter]:
    """Return a dataclass's fields as parameters.

    Those without a default come first, and among either kind the class's own before inherited ones.
    """
    hints = get_type_hints(kind, include_extras=True)
    order = sorted(
        dataclasses.fields(kind),
        key=lambda field: (field.default is not dataclasses.MISSING, field.name not in kind.__annotations__),
    )
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_told(hints[field.name], kind.otherwise.get(field.name)),
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
        )
        for field in order
    ]


def _told(option: Any, otherwise: str | None) -> Any:
    """Return an option's annotation whose help ends with what holds where the option is not given."""
    if otherwise is None:
        return option
    value, told = get_args(option)
    told = copy(told)
    told.help = f"{told.help}; {otherwise}."
    return Annotated[value, told]


#: Title of the options in ``--help`` that limit plans.
_USABLE = "What plans may use"


def _feature(field: str, text: str) -> Any:
    """Return the option that allows or forbids a feature, by the field of `PlannerRules`."""
    name = "/".join(spell_flag(field, value) for value in (True, False))
    help_text = f"{text}; default: the cluster file's planner setting, else on."
    return typer.Option(name, help=help_text, rich_help_panel=_USABLE)


@dataclass(frozen=True, kw_only=True)
class PlanFeatures:
    """The features that plans may use, how few they should, and the work of the search.

    ``None``: the command line does not say.
    """

    ministages: Annotated[
        bool | None,
        _feature("ministages", "Let a stage run its layers in parts, which saves memory or idle time"),
    ] = None
    offload: Annotated[
        bool | None, _feature("offload", "Keep weights, optimizer state or activations in host memory")
    ] = None
    unequal_replicas: Annotated[
        bool | None,
        _feature("unequal_replicas", "Let replicas differ in GPUs, stages and shares of the batch"),
    ] = None
    unequal_stages: Annotated[
        bool | None,
        _feature("unequal_stages", "Let stages differ in layers and ranks; ministages and offload need this"),
    ] = None
    unequal_experts: Annotated[
        bool | None, _feature("unequal_experts", "Let faster or larger GPUs hold more experts of a layer")
    ] = None

    divide_images: Annotated[
        bool,
        typer.Option(
            "--divide-images/--no-divide-images",
            help="Divide images among the units of a replica's first stage by speed; else each encodes all.",
            rich_help_panel=_USABLE,
        ),
    ] = True
    fastest: Annotated[
        bool,
        typer.Option(
            "--fastest",
            help="Give the fastest plan, whatever it uses; default: of plans that take at most 1 % longer "
            "the one that uses least beyond Megatron's flags.",
            rich_help_panel=_USABLE,
        ),
    ] = False
    simplest: Annotated[
        bool,
        typer.Option(
            "--simplest",
            help="Give the plan that uses least beyond Megatron's flags of those that take at most 5 % "
            "longer than the fastest.",
            rich_help_panel=_USABLE,
        ),
    ] = False

    effort: Annotated[
        Literal["low", "normal", "high"],
        typer.Option(
            help="Work of planning: how many changes of the best plans and layouts of Megatron's flags are "
            "timed, and for how much more memory plans are searched and then changed to fit.",
            rich_help_panel=_USABLE,
        ),
    ] = "normal"
    fp8_everywhere: Annotated[
        bool,
        typer.Option(
            "--fp8-everywhere",
            help="Compute in fp8 on all GPUs, also where bf16 is faster, and refuse those without it; with "
            "--precision fp8.",
            rich_help_panel=_USABLE,
        ),
    ] = False

    @property
    def simpler_within(self) -> float:
        """Part of an iteration by which the plan may take longer than the fastest if it is simpler."""
        from megatron_hexi.planner.simplest import ABOUT_AS_FAST, SIMPLEST

        if self.fastest and self.simplest:
            raise HexiError("--fastest and --simplest: ask for two plans; leave one of them out")
        return 0.0 if self.fastest else SIMPLEST if self.simplest else ABOUT_AS_FAST

    @property
    def rules(self) -> PlannerRules:
        """The command line's rules of what plans may use."""
        for name in ("ministages", "offload"):
            if getattr(self, name) and self.unequal_stages is False:
                raise HexiError(
                    f"{spell_flag(name, True)} and {spell_flag('unequal_stages', False)}: the first needs "
                    "the unequal stages that the second forbids; leave out one of them"
                )
        names = (field.name for field in dataclasses.fields(PlannerRules))
        return PlannerRules(**{name: getattr(self, name) for name in names})
