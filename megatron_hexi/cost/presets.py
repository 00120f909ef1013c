"""Models by name or by file. The presets and their sources are in data/models.yaml."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_hexi.argument_file import split_words
from megatron_hexi.cost.hugging_face import model_from_config
from megatron_hexi.cost.hugging_face_config import read_config
from megatron_hexi.cost.hugging_face_constants import constants_of
from megatron_hexi.cost.megatron_arguments import (
    ArgumentTerms,
    check_arguments,
    model_from_arguments,
    terms_from_arguments,
)
from megatron_hexi.cost.model import Model
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan
from megatron_hexi.text_file import read_text
from megatron_hexi.yaml_file import read_yaml
from megatron_hexi.yaml_schema import short

DATA = Path(__file__).parent / "data" / "models.yaml"
#: A config.json is a few kilobytes; words of megabytes take seconds to split.
MAX_BYTES = 2**17


@functools.cache
def presets() -> Mapping[str, Model]:
    """All presets by name, in the order of the data."""
    return MappingProxyType(
        {
            name: Model(name=name, **{field: value for field, value in entry.items() if field != "constants"})
            for name, entry in read_yaml(DATA).data.items()
        }
    )


@functools.cache
def _constants() -> Mapping[str, tuple[str, ...]]:
    """Megatron's flags for what shapes leave open, of all presets by name."""
    return {
        name: tuple(str(word) for pair in entry["constants"].items() for word in pair)
        for name, entry in read_yaml(DATA).data.items()
    }


def read_model(name_or_path: str | os.PathLike[str]) -> Model:
    """A model: a preset's name, a Hugging Face config.json or its folder, a file of Megatron's arguments.

    Raises:
        HexiError: neither a preset nor a file, or a file that does not tell all that is needed.
    """
    name = os.fspath(name_or_path)
    path = model_file(name)
    if path is None:
        return presets()[name]
    text = _read(name, path)
    if _is_json(text, path):
        return model_from_config(text, path)
    return model_from_arguments(text, path)


def read_terms(name_or_path: str | os.PathLike[str]) -> ArgumentTerms | None:
    """What is said of the job by what `read_model` takes; only a file of Megatron's arguments says anything.

    Raises:
        HexiError: as `read_model`.
    """
    name = os.fspath(name_or_path)
    path = model_file(name)
    if path is None:
        return None
    text = _read(name, path)
    return None if _is_json(text, path) else terms_from_arguments(text, path)


def argument_words(name_or_path: str | os.PathLike[str]) -> list[str] | None:
    """Return the words of a file of Megatron's arguments; ``None`` for other kinds of models.

    Raises:
        HexiError: as `read_model`.
    """
    name = os.fspath(name_or_path)
    path = model_file(name)
    if path is None:
        return None
    text = _read(name, path)
    return None if _is_json(text, path) else split_words(text, path)


def check_options(name_or_path: str | os.PathLike[str], plan: Plan) -> None:
    """Hold the options of a file of Megatron's arguments against a plan; other kinds of models have none.

    Raises:
        HexiError: as `read_model`, or an option that such a plan does not carry out.
    """
    name = os.fspath(name_or_path)
    path = model_file(name)
    if path is not None and not _is_json(text := _read(name, path), path):
        check_arguments(text, path, plan)


def constant_flags(name_or_path: str | os.PathLike[str]) -> list[str]:
    """Return Megatron's flags for the constants of a preset or config.json; none for a file of arguments.

    Raises:
        HexiError: as `read_model`.
        NoFlagError: a constant that Megatron has no flag for.
    """
    name = os.fspath(name_or_path)
    path = model_file(name)
    if path is None:
        return list(_constants()[name])
    text = _read(name, path)
    if not _is_json(text, path):
        return []
    return [word for pair in constants_of(read_config(text, path)) for word in pair if word]


def _read(name: str, path: Path) -> str:
    if not os.path.exists(path):
        raise HexiError(f"model {short(name)} is neither a preset nor a file; {_hint(name)}")
    return read_text(path, MAX_BYTES)


def _is_json(text: str, path: Path) -> bool:
    return path.suffix == ".json" or text.lstrip().startswith("{")


def model_file(name: str) -> Path | None:
    """The file that a model is read from, there or not; ``None``: it is a preset."""
    if name in presets():
        return None
    return Path(name, "config.json") if os.path.isdir(name) else Path(name)


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), presets(), n=3)
    known = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(presets())}"
    return f"{known} (or give a Hugging Face config.json, or a file of Megatron's arguments)"
