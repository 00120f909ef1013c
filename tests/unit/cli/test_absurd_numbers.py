"""A number of thousands of digits in any place of any YAML file is an error of one line, as any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_hexi.cluster import read_cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.scenario import read_scenario
from megatron_hexi.plan import read_plan
from tests.support.mistakes import GOOD
from tests.support.stage_layouts import stage_layout

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTER = EXAMPLES / "clusters" / "mixed-16.yaml"
ABSURD = int("f" * 4000, 16)


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index of a document, of branches and leaves."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from places(value, (*place, key))


def with_value(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    parent = data
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    return data


def documents(folder: Path) -> dict[str, tuple[Any, str]]:
    """By name: what reads a file, and a file's text."""
    stage_layout("offload", folder)

    def scenario(path: Path) -> None:
        read_scenario(path, read_cluster(CLUSTER))

    return {
        "plan": (read_plan, GOOD),
        "stages": (read_plan, (folder / "offload.yaml").read_text()),
        "cluster": (read_cluster, CLUSTER.read_text()),
        "scenario": (scenario, (EXAMPLES / "scenarios" / "congested-link.yaml").read_text()),
    }


@pytest.mark.parametrize("name", ["plan", "stages", "cluster", "scenario"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_it_is_named(name, sign, tmp_path):
    read, text = documents(tmp_path)[name]
    data = yaml.safe_load(text)
    path = tmp_path / "document.yaml"
    found = list(places(data))
    assert len(found) > 5
    for place in found:
        changed = yaml.safe_dump(with_value(data, place, "ABSURD")).replace("ABSURD", f"{sign}0x{ABSURD:x}")
        path.write_text(changed)
        with pytest.raises(HexiError) as caught:
            read(path)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert len(message) < 400 + len(str(path)), place
