"""The types of values in cluster files and the catalogue, and errors that name file, place and remedy."""

from __future__ import annotations

from typing import Annotated, NoReturn

from pydantic import Field

from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import Place, YamlFile

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9](\.?[A-Za-z0-9_-]+)*\.?$")]
Text = Annotated[str, Field(min_length=1, max_length=2000)]
#: A rate, with bounds far outside any hardware, which catch a wrong unit but no fast machine.
Rate = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
Latency = Annotated[float, Field(strict=True, ge=0, le=1e7, allow_inf_nan=False)]
Memory = Annotated[float, Field(strict=True, gt=0, le=1e5, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Size = Annotated[float, Field(strict=True, ge=1, le=2**40, allow_inf_nan=False)]


def refuse(source: YamlFile, place: Place, problem: str, remedy: str) -> NoReturn:
    """Raise a `ClusterError` about a broken rule, with the place in the document and the remedy."""
    raise ClusterError(f"{source.where(place)} {problem}; {remedy}")
