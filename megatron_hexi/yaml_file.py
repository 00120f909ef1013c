"""YAML files read safely: no code, no bombs, no repeated keys, and a line number for every value.

PyYAML's safe loader accepts repeated keys, expands aliases without bound, crashes on deep nesting and loses
line numbers. Here these are refused, and `YamlFile.where` gives the line of any place for errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: A place in a document: keys and indices from the root.
Place = tuple[str | int, ...]

#: A plan is nested ten levels deep; the C parser overflows its stack at some ten thousand.
MAX_DEPTH = 50


@dataclass(frozen=True)
class YamlFile:
    """A document with the lines of its parts.

    Args:
        lines: line number (from 1) of each place.
    """

    path: Path
    data: Any
    lines: Mapping[Place, int]

    def where(self, place: Place) -> str:
        """Return ``file:line: spelled.out[0].place``, with the nearest line above for an absent place."""
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known, 1)
        return f"{self.path}:{line}: {spell_place(place)}" if place else f"{self.path}:{line}"


def spell_place(place: Place) -> str:
    """Return a place as text: ``groups[1].heads`` for ``("groups", 1, "heads")``."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


class Dumper(yaml.SafeDumper):
    """Writes values as people write them: no aliases, and lists without mappings on one line."""

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        """Return a list, on one line unless it has mappings."""
        flow = not any(isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        """Return that each value is written out."""
        return True


def read_yaml(path: str | os.PathLike[str]) -> YamlFile:
    """Return the YAML document of a file."""
    return yaml_from_text(Path(path), read_text(path))


def yaml_from_text(path: Path, text: str) -> YamlFile:
    """Return the document of a text; `path` is for errors. Raises as `read_yaml` does."""
    lines: dict[Place, int] = {}
    try:
        _refuse_bombs(path, text)
        node = yaml.compose(text, Loader=_LOADER)
        # A loader keeps every node that it has read: a fresh one for each file.
        data = None if node is None else _build(path, node, (), lines, yaml.SafeLoader(""))
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        reason = ", ".join(part for part in (problem.context, problem.problem) if part)
        if "nesting depth" in reason:  # libyaml's own limit, since 0.2.6
            raise HexiError(_too_deep(path, line)) from None
        raise HexiError(f"{path}:{line}: not valid YAML ({reason}); correct that line") from None
    except yaml.YAMLError as problem:
        reason = str(problem).splitlines()[0]
        raise HexiError(f"{path}: not text ({reason}); is it the right file?") from None
    return YamlFile(path, data, lines)


# libyaml's parser where PyYAML was built with it: about eight times faster, the same nodes.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refuse_bombs(path: Path, text: str) -> None:
    """Refuse aliases, which can stand for much more than is written, and nesting too deep for the parser."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise HexiError(f"{path}:{line}: alias *{event.anchor} is not allowed here; write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise HexiError(_too_deep(path, line))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _too_deep(path: Path, line: int) -> str:
    return f"{path}:{line}: nested more than {MAX_DEPTH} levels deep; is it the right file?"


def _build(
    path: Path, node: yaml.Node, place: Place, lines: dict[Place, int], scalars: yaml.SafeLoader
) -> Any:
    lines[place] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_build(path, child, (*place, i), lines, scalars) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise HexiError(f"{path}:{line}: a key that is a list or a mapping; keys are plain words")
            key = str(key_node.value)
            if key in result:
                raise HexiError(
                    f"{path}:{line}: {spell_place((*place, key))} is given twice; keep one of them"
                )
            result[key] = _build(path, value_node, (*place, key), lines, scalars)
        return result
    try:
        if "\0" in node.value:  # no name of a file, a host or a model has one
            raise ValueError
        return scalars.construct_object(node)
    except (ValueError, yaml.YAMLError):
        where = f"{path}:{lines[place]}: {spell_place(place)}"
        said = f"{where}: {str(node.value)[:40]!r} cannot be read as number, text, true, false or null"
        raise HexiError(f"{said}; write one of these, without a tag (!)") from None
