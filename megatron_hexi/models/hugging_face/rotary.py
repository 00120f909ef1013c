"""Rotary embeddings of a Hugging Face model as Megatron's flags state them.

transformers' names and formulas are in modeling_rope_utils.py, Megatron's in
megatron/core/models/common/embeddings; a test compares the frequencies of both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models.hugging_face.config import Config, positive, short

Flags = list[tuple[str, str]]

#: Constants of Megatron's --use-rope-scaling; megatron-core builds models with this factor,
#: whatever --rope-scaling-factor says (gpt_builders.py up to 0.18, argument_utils.py in 0.19).
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
#: Constants of YaRN in latent attention (MLATransformerConfig) that no flag sets.
_LATENT_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
_LATENT_POSITIONS = 4096
#: Kinds of Gemma's layers.
_BY_KIND = ("full_attention", "sliding_attention")


def rotary_flags(config: Config) -> Flags:
    """Return Megatron's flags for a model's rotary embeddings.

    Raises:
        HexiError: a value is not usable, or a field is not known.
        NoFlagError: Megatron does not have the scaling.
    """
    name, rope = _mapping(config)
    reader = _Rope(config, name, rope)
    base = reader.number("rope_theta", config.get("rope_theta"))
    part = _rotated_part(reader)
    kinds = _LATENT_KINDS if config.has("kv_lora_rank") else _KINDS
    if config.model_type == "phi3":  # transformers takes any scaling of this type for longrope
        kinds = {"default": _KINDS["default"]}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        reader.lack("rope_type" if "rope_type" in rope else "type", f"Megatron computes {known} only")
    fields, flags_of = kinds[kind]
    reader.check({*fields, "rope_theta", "rope_type", "type", "partial_rotary_factor"})
    flags = flags_of(reader)
    if base != int(base):
        reader.lack("rope_theta", "Megatron's --rotary-base is a whole number", base)
    return [("--rotary-base", str(int(base))), *part, *flags]


def check_rotary_by_kind(config: Config) -> None:
    """Check the rotary embeddings of Gemma 3, whose layers with a window have another base.

    Raises:
        HexiError: a value is not usable, or a field is not known.
    """
    local, both = config.number("rope_local_base_freq"), config.get("rope_parameters")
    if both is not None and (not isinstance(both, dict) or both.keys() - _BY_KIND):
        config.refuse("rope_parameters", both, f"write a mapping with {' and '.join(_BY_KIND)}")
    for kind in _BY_KIND:
        values: dict[str, Any] = {"rope_parameters": (both or {}).get(kind)}
        if kind == "sliding_attention":
            values |= {"rope_theta": local, "rope_scaling": None}
        with contextlib.suppress(NoFlagError):
            rotary_flags(replace(config, values=config.values | values))


def _rotated_part(rope: _Rope) -> Flags:
    """Return the flag for the part of each head that is rotated; empty: the whole head."""
    place, value = "partial_rotary_factor", rope.rope.get("partial_rotary_factor")
    if not rope.config.has(place):
        if value not in (None, 1):
            rope.refuse(place, "give a model with 1", "rotating a part of a head is not supported")
        return []
    part = rope.number(place, rope.config.get(place))
    if part > 1:
        value = rope.config.get(place) if value is None else value
        rope.config.refuse(place, value, "write a number up to 1", "more than a head cannot be rotated")
    return [("--rotary-percent", str(part))] if part < 1 else []


def _mapping(config: Config) -> tuple[str, dict[str, Any]]:
    """Return name and content of the mapping rope_parameters (transformers 5) or rope_scaling (earlier)."""
    given = {name: config.get(name) for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    if len(given) > 1 and given["rope_parameters"] != given["rope_scaling"]:
        raise HexiError(f"{config.path}: rope_parameters and rope_scaling differ; remove one of them")
    for name, rope in given.items():
        if not isinstance(rope, dict):
            config.refuse(name, rope, "write a mapping, or null")
        return name, rope
    return "rope_scaling", {}


class _Rope:
    """Reads values of rope_parameters or rope_scaling, and raises the errors about them."""

    def __init__(self, config: Config, name: str, rope: dict[str, Any]) -> None:
        self.config, self.rope, self._name = config, rope, name

    def number(self, field: str, default: Any = None) -> float:
        """Return the value of a field that is a number above 0; the default if it is missing or null."""
        value = self.rope.get(field)
        return positive(default if value is None else value, self._place(field), self.config.path)

    @property
    def positions(self) -> int:
        """Number of positions before scaling; by default max_position_embeddings, as in transformers."""
        own = self.config.get("original_max_position_embeddings")
        value = own or self.rope.get("original_max_position_embeddings")
        if value is None:
            return self.config.size("max_position_embeddings")
        place = self._place("original_max_position_embeddings")
        number = positive(value, place, self.config.path)
        if number != int(number):
            raise HexiError(f"{self.config.path}: {place} = {short(value)}; write a whole number")
        return int(number)

    def check(self, known: Any) -> None:
        """Refuse fields that the kind of scaling does not have."""
        for field, value in self.rope.items():
            if field not in known and value is not None:
                self.refuse(field, "remove it if the model does not depend on it", "its effect is not known")

    def refuse(self, field: str, remedy: str, problem: str) -> NoReturn:
        """Raise the error about a value that is not supported."""
        said = f"{self._place(field)} = {short(self.rope.get(field))}"
        raise HexiError(f"{self.config.path}: {said}: {problem}; {remedy}")

    def lack(self, field: str, problem: str, value: Any = None) -> NoReturn:
        """Raise the error about a value that Megatron has no flag for."""
        said = short(self.rope.get(field) if value is None else value)
        raise NoFlagError(
            f"{self.config.path}: {self._place(field)} = {said}: {problem}; change it in a copy to "
            "train another model of the same shapes"
        )

    def _place(self, field: str) -> str:
        return f"{self._name}.{field}" if field in self.rope else field


def _default(rope: _Rope) -> Flags:
    return []


def _linear(rope: _Rope) -> Flags:
    factor = rope.number("factor")
    if factor != int(factor):
        rope.lack("factor", "Megatron's --rotary-seq-len-interpolation-factor is a whole number")
    return [("--rotary-seq-len-interpolation-factor", str(int(factor)))]


def _llama3(rope: _Rope) -> Flags:
    found = {field: rope.number(field) for field in _LLAMA3}
    for field, built_in in _LLAMA3.items():
        if found[field] != built_in:
            rope.lack(field, f"Megatron's --use-rope-scaling has {built_in} built in")
    if rope.positions != _LLAMA3_POSITIONS:
        problem = f"Megatron's --use-rope-scaling has {_LLAMA3_POSITIONS} built in"
        rope.lack("original_max_position_embeddings", problem, rope.positions)
    return [("--use-rope-scaling", "")]


def _yarn(rope: _Rope) -> Flags:
    """Return YaRN's flags, which Megatron has from 0.19 on."""
    positions = rope.positions
    factor = rope.number("factor", rope.config.size("max_position_embeddings") / positions)
    mscale, all_dim = _concentration(rope, factor)
    values = {
        "--rotary-scaling-factor": factor,
        "--yarn-original-max-position-embeddings": positions,
        "--yarn-beta-fast": rope.number("beta_fast", 32.0),
        "--yarn-beta-slow": rope.number("beta_slow", 1.0),
        "--mscale": mscale,
        "--mscale-all-dim": all_dim,
    }
    flags = [("--position-embedding-type", "yarn"), *((flag, str(value)) for flag, value in values.items())]
    truncate = rope.rope.get("truncate")
    if truncate not in (None, True, False):
        rope.refuse("truncate", "write true or false", "is not usable")
    return [*flags, *([("--no-yarn-correction-range-round-to-int", "")] if truncate is False else [])]


def _concentration(rope: _Rope, factor: float) -> tuple[float, float]:
    """Return Megatron's --mscale and --mscale-all-dim for transformers' factor of sines and cosines.

    Megatron multiplies by (1 + 0.1 mscale ln factor) / (1 + 0.1 all_dim ln factor), or 1 up to factor 1.
    """
    if rope.rope.get("attention_factor") is not None:
        wanted = rope.number("attention_factor")
        if factor > 1:
            return (wanted - 1) / (0.1 * math.log(factor)), 0.0
        if wanted != 1:
            rope.lack("attention_factor", "Megatron has 1 where factor is at most 1")
    elif rope.rope.get("mscale") and rope.rope.get("mscale_all_dim"):
        return rope.number("mscale"), rope.number("mscale_all_dim")
    return 1.0, 0.0


def _latent_default(rope: _Rope) -> Flags:
    return [("--rope-type", "rope"), ("--no-rope-fusion", "")]  # Megatron fuses YaRN only


def _latent_yarn(rope: _Rope) -> Flags:
    """Return YaRN's flags for latent attention.

    Megatron and transformers both multiply its scores by (1 + 0.1 mscale_all_dim ln factor) squared.
    """
    positions = rope.positions
    factor = rope.number("factor", rope.config.size("max_position_embeddings") / positions)
    for field, built_in in _LATENT_YARN.items():
        if rope.number(field, built_in) != built_in:
            rope.lack(field, f"Megatron's latent attention has {built_in} built in")
    if positions != _LATENT_POSITIONS:
        problem = f"Megatron's latent attention has {_LATENT_POSITIONS} built in"
        rope.lack("original_max_position_embeddings", problem, positions)
    truncate = rope.rope.get("truncate")
    if truncate not in (None, True):
        rope.lack("truncate", "Megatron's latent attention has true built in")
    mscale, all_dim = _concentration(rope, factor)
    if (rope.rope.get("mscale_all_dim") or 0) != all_dim:
        rope.lack("mscale_all_dim", "Megatron scales rotary embeddings and scores by it, or neither")
    values = {"--rotary-scaling-factor": factor, "--mscale": mscale, "--mscale-all-dim": all_dim}
    return [("--rope-type", "yarn"), *((flag, str(value)) for flag, value in values.items())]


_YARN_FIELDS = (
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate"),
)
_Kinds = dict[str, tuple[tuple[str, ...], Callable[[_Rope], Flags]]]
#: Kinds of scaling that Megatron has: fields of their mappings, and their flags.
_KINDS: _Kinds = {
    "default": (("factor", "original_max_position_embeddings"), _default),
    "linear": (("factor",), _linear),
    "llama3": ((*_LLAMA3, "original_max_position_embeddings"), _llama3),
    "yarn": (_YARN_FIELDS, _yarn),
}
#: Kinds of scaling that Megatron has in latent attention, likewise.
_LATENT_KINDS: _Kinds = {
    "default": (("factor", "original_max_position_embeddings"), _latent_default),
    "yarn": (_YARN_FIELDS, _latent_yarn),
}
