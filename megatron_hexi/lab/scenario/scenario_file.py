"""Scenario files: read and checked."""

from __future__ import annotations

import os

from pydantic import TypeAdapter

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.scenario.events import Event, find_events
from megatron_hexi.lab.scenario.scenario_model import Scenario
from megatron_hexi.yaml_file import read_yaml
from megatron_hexi.yaml_schema import parse, short

_ADAPTER = TypeAdapter(Scenario)


def read_scenario(path: str | os.PathLike[str], cluster: Cluster) -> tuple[Scenario, tuple[Event, ...]]:
    """Read a scenario file, and find its events on a cluster.

    Raises:
        HexiError: the file cannot be read or is not YAML, a field or a rule is broken; one line with file,
            line, place, value and remedy.
    """
    source = read_yaml(path)
    if not isinstance(source.data, dict):
        content = "is empty" if source.data is None else f"holds {short(source.data)}"
        raise HexiError(f"{source.path}:1: {content}; a scenario is a mapping with lasts and events")
    scenario = parse(_ADAPTER, source.data, source.where, HexiError)
    return scenario, find_events(scenario, cluster, source)
