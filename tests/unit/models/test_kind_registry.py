"""No file outside `kinds` asks which kind a state is of."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_hexi
from megatron_hexi.kinds import STATES

PACKAGE = Path(megatron_hexi.__file__).parent
NAMES = {kind.kind for kind in STATES.values()}


def _asks(node: ast.AST) -> bool:
    """Whether a comparison, or a look-up in a literal table, has the name of a kind with a state in it."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        sides = [key for key in node.value.keys if key is not None]
    else:
        return False
    return any(
        isinstance(part, ast.Constant) and part.value in NAMES for side in sides for part in ast.walk(side)
    )


def test_conditionals_on_kinds_with_a_state_are_in_their_package():
    found = [
        f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if "kinds" not in file.relative_to(PACKAGE).parts[:1]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if _asks(node)
    ]
    assert not found
    assert any(_asks(node) for node in ast.walk(ast.parse('state.kind == "mamba"')))
