"""Errors in cluster files and in the catalogue: a wrong format, or a broken rule, with its place."""

from __future__ import annotations

from typing import NoReturn

from pydantic import TypeAdapter

from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import parse, short


def parse_file[T](kind: TypeAdapter[T], source: YamlFile, shape: str) -> T:
    """Parse a document into a type.

    Args:
        kind: the type.
        source: the document.
        shape: description of a correct file, for the error about an empty or wholly different one.

    Raises:
        ClusterError: the first thing that does not fit: file, line, place, value, remedy.
    """
    if not isinstance(source.data, dict):
        problem = "is empty" if source.data is None else f"holds {short(source.data)}"
        raise ClusterError(f"{source.path}:1: {problem}; {shape}")
    return parse(kind, source.data, source.where, ClusterError)


def refuse(source: YamlFile, place: Place, problem: str, remedy: str) -> NoReturn:
    """Raise the error about a broken rule, with its place and the remedy."""
    raise ClusterError(f"{source.where(place)} {problem}; {remedy}")
