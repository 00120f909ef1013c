"""Models by name or by file. The presets and their sources are in data/models.yaml."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_hexi.cost.hugging_face import model_from_config
from megatron_hexi.cost.megatron_arguments import ArgumentTerms, model_from_arguments, terms_from_arguments
from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text
from megatron_hexi.yaml_file import read_yaml

DATA = Path(__file__).parent / "data" / "models.yaml"
#: A config.json is a few kilobytes.
MAX_BYTES = 2**20


@functools.cache
def presets() -> Mapping[str, Model]:
    """All presets by name, in the order of the data."""
    entries = read_yaml(DATA).data
    return MappingProxyType({name: Model(name=name, **entry) for name, entry in entries.items()})


def read_model(name_or_path: str | os.PathLike[str]) -> Model:
    """A model: a preset's name, a Hugging Face config.json or its folder, a file of Megatron's arguments.

    Raises:
        HexiError: neither a preset nor a file, or a file that does not tell all that is needed.
    """
    name = os.fspath(name_or_path)
    if name in presets():
        return presets()[name]
    text, path = _read(name)
    if _is_json(text, path):
        return model_from_config(text, path)
    return model_from_arguments(text, path)


def read_terms(name_or_path: str | os.PathLike[str]) -> ArgumentTerms | None:
    """What is said of the job by what `read_model` takes; only a file of Megatron's arguments says anything.

    Raises:
        HexiError: as `read_model`.
    """
    name = os.fspath(name_or_path)
    if name in presets():
        return None
    text, path = _read(name)
    return None if _is_json(text, path) else terms_from_arguments(text, path)


def _read(name: str) -> tuple[str, Path]:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise HexiError(f"model {name!r} is neither a preset nor a file; {_hint(name)}")
    return read_text(path, MAX_BYTES), path


def _is_json(text: str, path: Path) -> bool:
    return path.suffix == ".json" or text.lstrip().startswith("{")


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), presets(), n=3)
    known = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(presets())}"
    return f"{known} (or give a Hugging Face config.json, or a file of Megatron's arguments)"
