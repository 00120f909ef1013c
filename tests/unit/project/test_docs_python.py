"""Names that pages import from the package exist. Nothing is imported: `megatron_hexi.api` changes torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _imports(text: str) -> list[tuple[str, str]]:
    """Return the names that a page's Python imports from the package, each with its module."""
    return [
        (node.module or "", alias.name)
        for block in _BLOCK.findall(text)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_hexi")
        for alias in node.names
    ]


def _names(module: str) -> set[str]:
    """Return the names at the top of a module's source."""
    path = REPOSITORY.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


PAGES = {page: _imports(page.read_text()) for page in (REPOSITORY / "docs").rglob("*.md")}


@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if found], ids=lambda page: page.stem)
def test_imports_of_a_page_are_there(page):
    for module, name in PAGES[page]:
        assert name in _names(module), f"{page.name}: from {module} import {name}"


def test_a_name_that_is_not_there_is_found():
    ((module, name),) = _imports("```python\nfrom megatron_hexi.cost import Job\n```\n")
    assert name not in _names(module)
    assert any(PAGES.values())
