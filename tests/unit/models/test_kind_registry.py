"""No file outside `kinds` asks which kind a state is of, and few for other kinds."""

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


#: What says of a model which kinds of parts its layers have, and what such a model is called.
QUESTIONS = {"attends", "experts", "latent", "mtp_layers", "pattern", "short_conv", "state"}
QUESTIONS |= {"window"}
MODELS = {"kind", "last", "mixer", "model", "shapes"}
#: Conditionals on kinds that are left, by file, each with the reason; rivals in planner/baselines aside.
LEFT = {
    "cli/planning.py": (1, "the imbalance of experts is stated of models that have some"),
    "convert/config.py": (2, "windows and further predictions are refused, each with a remedy"),
    "cost/experts.py": (1, "a plan places experts in domains, which other models do not have"),
    "elastic/planning/survivors.py": (
        2,
        "balancing losses are means over a micro-batch; experts lie in stages",
    ),
    "lab/simulator/simulated_iteration.py": (2, "ranks with experts go through a layer together"),
    "models/planned_kinds.py": (1, "latent attention over packed documents is refused by name"),
    "planner/expert_placement.py": (1, "a search tries a rule of placement for models with experts"),
    "planner/joint/assembly.py": (1, "Megatron's flags put experts elsewhere than a plan does"),
    "planner/joint/joint_search.py": (1, "a plan for experts is searched once for each placement"),
    "planner/moves/experts.py": (1, "rows of other models do not travel to experts"),
    "planner/request.py": (2, "sizes of expert domains, and chunks, are refused by name"),
    "report/planned.py": (2, "lines that tell a reader of experts and of further predictions"),
}


def _tested(node: ast.AST) -> list[ast.expr]:
    """Return the expressions whose truth a node asks for."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    is_none = isinstance(node, ast.Compare) and any(
        isinstance(side, ast.Constant) and side.value is None for side in node.comparators
    )
    return [node] if is_none and isinstance(node, ast.expr) else []


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _questions(tree: ast.AST) -> set[tuple[int, int]]:
    """Return the places at which code asks for the kind of a model's parts, also by a name given to them."""
    found = set()
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        named = set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                both = (
                    (target.elts, value.elts)
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                    else ([target], [value])
                )
                named |= {_name(to) for to, part in zip(*both, strict=False) if _is_kind(part, set())}
        for node in ast.walk(scope):
            for test in _tested(node):
                sides = [test.left] if isinstance(test, ast.Compare) else [test]
                found |= {(side.lineno, side.col_offset) for side in sides if _is_kind(side, named)}
    return found


def _is_kind(node: ast.expr, named: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in named
    return isinstance(node, ast.Attribute) and node.attr in QUESTIONS and _name(node.value) in MODELS


def test_conditionals_on_parts_of_layers_are_in_their_package_but_for_those_named():
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        number = len(_questions(ast.parse(file.read_text(encoding="utf-8"))))
        if number and not name.startswith(("kinds/", "planner/baselines/")):
            found[name] = number
    assert found == {file: number for file, (number, _) in LEFT.items()}


def test_a_question_for_a_kind_is_seen():
    code = "def f(model):\n  latent = model.latent\n  if latent is None or model.attends:\n    pass"
    assert len(_questions(ast.parse(code))) == 2
