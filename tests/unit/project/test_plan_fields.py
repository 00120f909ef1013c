"""Each field of the plan has a reader in training, or says why it needs none."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import megatron_hexi
from megatron_hexi.plan import JobTerms, Plan

PACKAGE = Path(megatron_hexi.__file__).parent
#: Where ranks read their plan, and where they derive their tables from it.
TRAINING = ("megatron", "runtime", "mesh", "options", "replan/training", "elastic/training", "plan")
#: Files of `plan` that read every field alike: the classes themselves, the file, and its rules.
NO_READERS = {"model.py", "terms.py", "file.py"}
#: Fields that no rank needs.
TOLD = {
    "Group.name": "for people",
    "Plan.version": "read with the file",
    "Plan.gpus": "read where ranks are started",
    "Plan.estimate": "the planner's prediction",
    "Plan.provenance": "for people",
}


def fields_of(kind: type) -> Iterator[tuple[str, str]]:
    """Class and name of the fields of a plan and of all that it consists of."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if f"{kind.__name__}.{field.name}" in TOLD:
            continue
        yield kind.__name__, field.name
        for part in parts_of(hints[field.name]):
            yield from fields_of(part)


def parts_of(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from parts_of(argument)


def read_in_training() -> set[str]:
    """Names that are read as attributes, as in `stage.layers`, and settings of the job by their names."""
    files = (path for room in TRAINING for path in (PACKAGE / room).rglob("*.py"))
    read = (path for path in files if path.parent.name != "plan" or not is_left_out(path))
    nodes = [node for path in read for node in ast.walk(ast.parse(path.read_text()))]
    loads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    terms = ast.walk(ast.parse((PACKAGE / "options" / "job_terms.py").read_text()))
    named = {node.value for node in terms if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {node.attr for node in loads} | (named & {field.name for field in dataclasses.fields(JobTerms)})


def is_left_out(path: Path) -> bool:
    return path.name in NO_READERS or path.name.startswith("check")


def test_training_reads_each_field_of_the_plan():
    found = set(fields_of(Plan))
    assert {("Stage", "offload"), ("Member", "state"), ("JobTerms", "micro_batch_size")} <= found
    read = read_in_training()
    unread = sorted(f"{kind}.{name}" for kind, name in found if name not in read)
    assert unread == [], "read it in training, or refuse it by name and list it in TOLD with the reason"
