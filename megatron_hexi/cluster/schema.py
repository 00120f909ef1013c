"""Parse cluster files and the catalogue, and raise errors that name file, place and remedy."""

from __future__ import annotations

from typing import NoReturn

from pydantic import TypeAdapter

from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import parse, short


def parse_file[T](kind: TypeAdapter[T], source: YamlFile, shape: str) -> T:
    """Parse a YAML document into a value of a type.

    Raises:
        ClusterError: the document does not fit the type; the message names the file, line, place, value and
            remedy of the first error.
    """
    if not isinstance(source.data, dict):
        problem = "is empty" if source.data is None else f"holds {short(source.data)}"
        raise ClusterError(f"{source.path}:1: {problem}; {shape}")
    return parse(kind, source.data, source.where, ClusterError)


def refuse(source: YamlFile, place: Place, problem: str, remedy: str) -> NoReturn:
    """Raise a `ClusterError` about a broken rule, with the place in the document and the remedy."""
    raise ClusterError(f"{source.where(place)} {problem}; {remedy}")
