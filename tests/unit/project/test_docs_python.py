"""What the pages import from the package is there."""

from __future__ import annotations

import ast
import importlib
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


PAGES = {page: _imports(page.read_text()) for page in (REPOSITORY / "docs").rglob("*.md")}


@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if found], ids=lambda page: page.stem)
def test_imports_of_a_page_are_there(page):
    for module, name in PAGES[page]:
        assert hasattr(importlib.import_module(module), name), f"{page.name}: from {module} import {name}"


def test_a_name_that_is_not_there_is_found():
    assert _imports("```python\nfrom megatron_hexi.cost import Nothing\n```\n") == [
        ("megatron_hexi.cost", "Nothing")
    ]
    assert any(PAGES.values())
