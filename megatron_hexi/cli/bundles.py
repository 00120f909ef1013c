"""Commands that take a bundle of options as one parameter, taken apart into typer's keywords."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, get_args, get_type_hints

from megatron_hexi.cli.options import Bundle


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
