"""Reads a config.json, checks every field, and gives the values with the defaults of the model's type."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.layer_list import MOST_LAYERS
from megatron_hexi.kinds.part import LARGEST
from megatron_hexi.models.hugging_face.fields import (
    HARMLESS_FIELDS,
    NAMES_OF_ONE_FIELD,
    NEEDED,
    ONLY,
    ModelType,
    Only,
)
from megatron_hexi.models.hugging_face.types import TYPES
from megatron_hexi.models.hugging_face.wrappers import ENCODERS, WRAPPERS


@dataclass(frozen=True)
class Config:
    """The fields of a config.json that its model type uses.

    Args:
        values: the file's values by field; aliases are replaced by the fields that they stand for.
        model_type: name of the model's type.
        path: the file, for messages.
        is_part: whether the file describes more than this language model, such as vision.
        encoder: its ``vision_config``; ``None``: it has none, or that of this type is not read.
    """

    values: dict[str, Any]
    model_type: str
    path: Path
    is_part: bool = False
    encoder: Config | None = None

    @property
    def kind(self) -> ModelType:
        """The fields of the model's type."""
        return ENCODERS[self.model_type] if self.model_type in ENCODERS else TYPES[self.model_type]

    def has(self, field: str) -> bool:
        """Return whether the model's type has a field that is used."""
        return field in self.kind.used

    def get(self, field: str) -> Any:
        """Return the value of a field, or the type's default if the file leaves it out.

        Raises:
            HexiError: the file leaves it out, and the type has no default.
        """
        value = self.values.get(field, self.kind.used[field])
        if value is NEEDED:
            raise HexiError(f"{self.path}: {field} is missing; add it")
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """Return the value of a field that is a whole number above 0, or `default` if it is null.

        Raises:
            HexiError: the value is no such number.
        """
        value = self.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            self.refuse(field, value, "write a whole number above 0")
        most = MOST_LAYERS if field in ("num_hidden_layers", "n_layer", "depth") else LARGEST
        if value > most:
            self.refuse(field, value, f"write a whole number up to {most}")
        return value

    def count(self, field: str) -> int:
        """Return the value of a field that is a whole number from 0.

        Raises:
            HexiError: the value is no such number.
        """
        value = self.get(field)
        if type(value) is not int or value < 0:
            self.refuse(field, value, "write a whole number from 0")
        return value

    def number(self, field: str) -> float:
        """Return the value of a field that is a number above 0.

        Raises:
            HexiError: the value is no such number.
        """
        return positive(self.get(field), field, self.path)

    def share(self, field: str) -> float:
        """Return the value of a field that is a number from 0.

        Raises:
            HexiError: the value is no such number.
        """
        return 0.0 if self.get(field) in (0, 0.0) else self.number(field)

    def flag(self, field: str) -> bool:
        """Return the value of a field that is true or false; null counts as false if that is the default.

        Raises:
            HexiError: the value is neither.
        """
        value = self.get(field)
        if value is None and not self.kind.used[field]:
            return False
        if type(value) is not bool:
            self.refuse(field, value, "write true or false")
        return value

    def refuse(self, field: str, value: Any, remedy: str, problem: str = "") -> NoReturn:
        """Raise the error about a value of a field.

        Args:
            problem: reason why the value is not supported; empty: the value is not usable.

        Raises:
            HexiError: always.
        """
        why = f": {problem}" if problem else ""
        raise HexiError(f"{self.path}: {field} = {short(value)}{why}; {remedy}")


def read_config(text: str, path: Path) -> Config:
    """Return the config.json of a text, after checking that every field is used, harmless or supported.

    Raises:
        HexiError: the text is not JSON, its type is unknown, its class is no causal language model, or a
            field is not supported or not known; with file, field, value and remedy.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as problem:
        line = getattr(problem, "lineno", 1)
        raise HexiError(f"{path}:{line}: not valid JSON ({problem}); correct that line") from None
    if not isinstance(values, dict):
        raise HexiError(f"{path}: not a mapping of fields; give a model's config.json")
    encoder = _encoder(values, path)
    values, is_part = _language_model(values, path)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in TYPES:
        found = "is missing" if model_type is None else f"= {short(model_type)} is not known"
        raise HexiError(
            f"{path}: model_type {found}; write one whose shapes are the same "
            f"({', '.join((*TYPES, *WRAPPERS))}), or give a file of Megatron's arguments"
        )
    config = _checked(values, model_type, path, is_part=is_part, encoder=encoder)
    _check_architectures(config, config.kind)
    return config


def _checked(values: dict[str, Any], model_type: str, path: Path, **more: Any) -> Config:
    """Return a file's fields of one type, each of which is used, harmless or supported."""
    kind = ENCODERS[model_type] if model_type in ENCODERS else TYPES[model_type]
    config = Config(_without_aliases(values, kind, path), model_type, path, **more)
    for field, value in config.values.items():
        if field == "quantization_config" and kind.stored_as:
            _check_stored(config, value, kind.stored_as)
        elif field not in kind.used and field not in kind.harmless and field not in HARMLESS_FIELDS:
            _check(config, field, value, kind.only.get(field) or ONLY.get(field) or _repeats(config, field))
    return config


def _encoder(values: dict[str, Any], path: Path) -> Config | None:
    """Return the encoder of images of a file; ``None``: the file has none, or none that is read."""
    name = values.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    fields = values.get("vision_config")
    if wrapper is None or not wrapper.encoder or fields is None:
        return None
    if not isinstance(fields, dict):
        raise HexiError(f"{path}: vision_config = {short(fields)}; write the mapping of the encoder's fields")
    return _checked(fields, wrapper.encoder, Path(f"{path}: vision_config"))


def _language_model(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], bool]:
    """Return the fields of a file's language model, and whether the file describes more, such as vision."""
    name = values.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None:
        return values, False
    own, apart = wrapper.text_name or wrapper.text_type, {"model_type", "architectures", *wrapper.harmless}
    text: Any = values.get("text_config")
    if "text_config" not in values and "hidden_size" in values:
        text = {field: value for field, value in values.items() if field not in apart}
        values = {field: value for field, value in values.items() if field in apart}
    if not isinstance(text, dict):
        raise HexiError(
            f"{path}: text_config = {short(text)}; write the mapping of the language model's fields"
        )
    if text.get("model_type", own) != own:
        raise HexiError(
            f"{path}: text_config.model_type = {short(text['model_type'])} in a {name}; "
            f"write {json.dumps(own)}"
        )
    given = {TYPES[wrapper.text_type].aliases.get(field, field) for field in text}
    defaults = {field: value for field, value in wrapper.defaults.items() if field not in given}
    text = {**defaults, **text, "model_type": wrapper.text_type}
    for field in ("rope_scaling", "rope_parameters"):
        text |= {field: _on_one_axis(text[field])} if isinstance(text.get(field), dict) else {}
    whole = Config(values, wrapper.text_type, path, is_part=True)
    for field, value in values.items():
        if field == "architectures":
            _check_class(whole, value, wrapper.architecture)
        elif field == "tie_word_embeddings":
            if text.setdefault(field, value) != value:
                whole.refuse(field, value, "write the same in both", "text_config has another value")
        elif field != "text_config" and field not in wrapper.harmless and field not in HARMLESS_FIELDS:
            _check(whole, field, value, ONLY.get(field))
    return text, True


def _on_one_axis(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping of rotary positions without their axes, whose places are the same in a text."""
    kept = {field: value for field, value in rope.items() if not field.startswith("mrope_")}
    return {field: "default" if value == "mrope" else value for field, value in kept.items()}


def positive(value: Any, field: str, path: Path) -> float:
    """Return a value as a number.

    Raises:
        HexiError: the value is not a finite number above 0.
    """
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise HexiError(f"{path}: {field} = {short(value)}; write a finite number above 0")
    return float(value)


def short(value: Any) -> str:
    """Return a value as JSON, cut to 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _without_aliases(values: dict[str, Any], kind: ModelType, path: Path) -> dict[str, Any]:
    found = {field: value for field, value in values.items() if field not in kind.aliases}
    for alias in values.keys() & kind.aliases.keys():
        field = kind.aliases[alias]
        if field in found and found[field] != values[alias]:
            both = f"{alias} = {short(values[alias])} and {field} = {short(found[field])}"
            raise HexiError(f"{path}: {both} mean the same field; remove one of them")
        found[field] = values[alias]
    return found


def _check(config: Config, field: str, value: Any, only: Only | None) -> None:
    if value is None:
        return  # as if it were left out
    if only is None:
        problem = f"transformers' {config.model_type} has no such field, and its effect is not known"
        config.refuse(field, value, "remove it if the model does not depend on it", problem)
    if value not in only.values:
        config.refuse(field, value, only.remedy, f"{only.what} is not supported")


def _repeats(config: Config, field: str) -> Only | None:
    """Return the value that a field repeats which nothing reads; ``None``: its effect is not known."""
    kind = config.kind
    names = next((names for names in NAMES_OF_ONE_FIELD if field in names), ())
    read = [name for name in names if name in kind.used or name in kind.only]
    if len(read) != 1:
        return None
    default = kind.used[read[0]] if read[0] in kind.used else kind.only[read[0]].values[0]
    value = config.values.get(read[0], default)
    return Only((value,), f"another value than {read[0]} = {short(value)}", "write the same in both")


def _check_stored(config: Config, value: Any, stored_as: str) -> None:
    """Refuse quantized weights, unless by the method of the published weights of this model type."""
    found = value.get("quant_method") if isinstance(value, dict) else value
    if value is not None and found != stored_as:
        only = ONLY["quantization_config"]
        config.refuse("quantization_config", value, only.remedy, f"{only.what} is not supported")


def _check_architectures(config: Config, kind: ModelType) -> None:
    named = config.get("architectures")
    if named is not None:
        _check_class(config, named, kind.architecture)


def _check_class(config: Config, named: Any, architecture: str) -> None:
    if not isinstance(named, list) or architecture.lower() not in (str(name).lower() for name in named):
        remedy = f"write [{json.dumps(architecture)}] to train a language model of these sizes"
        config.refuse("architectures", named, remedy, "this is no causal language model of the type")
