"""Generated pages and drawings are current, and say all that there is to say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import megatron_hexi
from scripts.docs import draw_pass
from scripts.docs.commands_page import commands
from scripts.docs.draw_schedules import spans
from scripts.docs.pages import DOCS, GENERATED
from scripts.docs.training_page import training_page

PACKAGE = Path(megatron_hexi.__file__).parent


@pytest.mark.parametrize("name", [name for name in GENERATED if name != "reference/combinations.md"])
def test_a_generated_file_is_current(name):
    path = DOCS / name
    current = path.exists() and path.read_text(encoding="utf-8") == GENERATED[name]()
    assert current, f"docs/{name} is stale; run: python -m scripts.docs"


@pytest.mark.parametrize("name", [name for name in GENERATED if name.endswith(".svg")])
def test_a_drawing_has_the_same_bytes_every_time(name):
    assert GENERATED[name]() == GENERATED[name]()


def test_every_command_and_option_is_on_the_page():
    text = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    found = dict(commands())
    assert {"hexi plan", "hexi testbed run"} <= set(found)
    for name, command in found.items():
        _, _, section = text.partition(f"\n## {name}\n")
        section = section.partition("\n## ")[0]
        for parameter in command.params:
            for word in parameter.opts if parameter.opts[0].startswith("-") else [parameter.metavar]:
                assert f"`{word}`" in section, f"{name}: {word}"


def test_every_variable_that_the_package_reads_is_on_the_page():
    """Of the rooms that training uses."""
    read = re.compile(r'environ(?:ment)?(?:\.get|\.setdefault)?[\[(]\s*"([A-Z_]+)"')
    rooms = [PACKAGE / room for room in ("megatron", "platform", "runtime")]
    files = [*PACKAGE.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))]
    found = {name for path in files for name in read.findall(path.read_text(encoding="utf-8"))}
    assert "RANK" in found
    page = training_page()
    missing = {name for name in found if f"`{name}`" not in page}
    assert missing == set(), "add them to VARIABLES in scripts/docs/training_page.py"


def test_the_reading_order_names_files_that_exist():
    _, _, order = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("\n## Reading order\n")
    paths = re.findall(r"`([\w/]+\.py)`", order)
    assert paths
    assert not [path for path in paths if not (PACKAGE / path).is_file()]


@pytest.mark.parametrize(("chunks", "end"), [(1, 24.0), (2, 21.0)])
def test_the_drawn_orders_end_when_the_formula_says(chunks: int, end: float):
    """Six micro-batches of 3 (1 forward, 2 backward), and 2 x 3 / chunks to fill and drain three stages."""
    assert max(span.end_s for span in spans(chunks)) == end


@pytest.mark.parametrize("backward", [False, True])
def test_the_drawn_pass_computes_on_keys_that_have_arrived(backward: bool):
    drawn = draw_pass.passes(backward)
    arrival = {
        span.name: span.end
        for span in drawn
        if span.name.startswith("keys") and span.lane == draw_pass.GROUPS
    }
    blocks = [span for span in drawn if span.lane == draw_pass.COMPUTE]
    assert all(one.end <= other.begin for one, other in itertools.pairwise(blocks))
    far = [span for span in blocks if span.name.startswith("keys")]
    assert {span.name.partition(",")[0] for span in far} == set(arrival)
    assert all(span.begin >= arrival[span.name.partition(",")[0]] for span in far)
