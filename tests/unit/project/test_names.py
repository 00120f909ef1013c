"""Names and docstrings of the package: what a reader meets must be told apart, and understood by itself."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import megatron_hexi

PACKAGE = Path(megatron_hexi.__file__).parent

#: A first line that begins so is mostly a fragment, whose noun is missing.
FRAGMENT = re.compile(r"(What|Who|Of|As|Whose|Where|How|That|Those)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def classes_and_first_lines() -> tuple[tuple[Path, tuple[str, ...], tuple[str, ...]], ...]:
    """Each module with the names of its classes and the first lines of its docstrings."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, Documented)]
        lines = tuple(text.splitlines()[0] for text in texts if text)
        found.append((path.relative_to(PACKAGE), classes, lines))
    return tuple(found)


def packages() -> list[str]:
    return sorted({path.parts[0] for path in (p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))})


def test_a_class_name_is_one_class():
    """Also of private classes: one name that is read in two files should mean one thing."""
    places = defaultdict(list)
    for path, classes, _ in classes_and_first_lines():
        for name in classes:
            places[name].append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared


def test_a_module_name_is_one_module_in_its_package():
    """Modules of one package import each other by names that are told apart without folders."""
    names = Counter(
        (path.parts[0], path.name) for path, _, _ in classes_and_first_lines() if len(path.parts) > 1
    )
    assert not {key for key, count in names.items() if count > 1 and not key[1].startswith("__")}


@pytest.mark.parametrize("package", packages())
def test_first_lines_are_sentences_or_noun_phrases(package):
    """At most three in a hundred begin with a word that mostly begins a fragment."""
    lines = [
        f"{path}: {line}"
        for path, _, texts in classes_and_first_lines()
        for line in texts
        if path.parts[0] == package
    ]
    fragments = [line for line in lines if FRAGMENT.match(line.partition(": ")[2])]
    assert len(fragments) <= 0.03 * len(lines), fragments
