"""The messages that the troubleshooting page explains are those that the package says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megatron_hexi

PACKAGE = Path(megatron_hexi.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"


def _spell(node: ast.AST) -> str:
    """A string with an ellipsis for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "".join(map(str, parts))


def _said() -> str:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(_spell(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr)))


SAID = _said()


def quoted_messages(page: str) -> list[str]:
    """Code in the first cell of a table's row, or anywhere with an ellipsis in it."""
    cells = [cell for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) if cell.startswith("`")]
    inside = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    elsewhere = [text for text in re.findall(r"`([^`\n]*…[^`\n]*)`", page) if not text.startswith("hexi:")]
    return sorted({*inside, *elsewhere})


MESSAGES = quoted_messages(PAGE.read_text(encoding="utf-8"))


def test_the_page_quotes_messages():
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_ours(message):
    assert message.strip("… ") in SAID
