"""Lists that say for each layer of a model whether it has a part, as Megatron's options write them."""

from __future__ import annotations

import ast
import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import argument_name

#: Largest number of layers, far more than any model has; a longer pattern is a mistake and would need memory.
MOST_LAYERS = 2**14


def layers_of(args: Namespace, flag: str, source: str, every: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """Return for each layer whether a frequency option selects it; an option without a value selects all.

    Args:
        flag: the option, whose value is a step or a pattern.
        source: file or command line of the arguments, for errors.
        every: whether a layer (counted from 0) has it, by a step.

    Raises:
        HexiError: a step below 1, or a pattern that does not fit the model's number of layers.
    """
    frequency = getattr(args, argument_name(flag))
    layers = range(min(args.num_layers or 0, MOST_LAYERS))
    if frequency is None:
        return tuple(True for _ in layers)
    if not isinstance(frequency, int):
        return tuple(layer_pattern(flag, frequency, args.num_layers, source))
    if frequency < 1:
        raise HexiError(f"{source}: {flag} {frequency}; write a whole number above 0, or a list of 0 and 1")
    return tuple(every(layer, frequency) for layer in layers)


def layer_pattern(flag: str, pattern: str | list[int], layers: int, source: str) -> list[bool]:
    """Parse a pattern of layers and return one value for each layer.

    Args:
        pattern: a list of 0 and 1, or Megatron's expression of such lists: "[0]*3+[1]*58".

    Raises:
        HexiError: the pattern is another expression, or has another number of layers.
    """
    try:
        values = _value(ast.parse(pattern, mode="eval").body) if isinstance(pattern, str) else pattern
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        values = None
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        said = str(pattern)[:40]
        raise HexiError(f"{source}: {flag} {said}: not a list of 0 and 1; write it as '[0]*3+[1]*{layers}'")
    if len(values) != layers:
        raise HexiError(
            f"{source}: {flag} has {len(values)} entries for the model's {layers} layers; give one for each"
        )
    return [bool(value) for value in values]


def pattern_text(layers: Sequence[bool]) -> str:
    """Return a pattern of layers as Megatron's expression, with repeated parts written once."""
    numbers = [int(has) for has in layers]
    for period in range(1, len(numbers) // 2 + 1):
        if numbers == numbers[:period] * (len(numbers) // period):
            return f"{str(numbers[:period]).replace(' ', '')}*{len(numbers) // period}"
    runs = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(runs) * 2 > len(numbers):
        return str(numbers).replace(" ", "")
    return "+".join(f"[{number}]*{count}" for number, count in runs)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of integers and lists with + and *; ValueError for any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _value(node.left), _value(node.right)
        kinds = {type(left), type(right)}
        if isinstance(node.op, ast.Add) and kinds == {list}:
            return _short(left + right)
        if isinstance(node.op, ast.Mult) and kinds == {list, int}:
            return _repeated(*((left, right) if isinstance(left, list) else (right, left)))
    raise ValueError


def _repeated(values: list[Any], times: int) -> list[Any]:
    if len(values) * times > MOST_LAYERS:
        raise ValueError
    return values * times


def _short(values: list[Any]) -> list[Any]:
    if len(values) > MOST_LAYERS:
        raise ValueError
    return values
