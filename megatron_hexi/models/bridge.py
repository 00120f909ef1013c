"""A Megatron Bridge configuration (run_config.yaml) as a file of Megatron's arguments.

Bridge writes its `ConfigContainer` as YAML whose ``_target_`` keys name classes and functions. None of these
is imported or called: only their names are compared. A field with the name of an argument of Megatron
becomes that argument's flag (`megatron_hexi.options.parser`); all other fields are in `bridge_fields`.

Each flag stands on the line of its field, so that later errors name the line of the YAML file.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_hexi.errors import HexiError
from megatron_hexi.models.bridge_fields import (
    ACTIVATIONS,
    ADAPTERS,
    DATASETS,
    DECIDED,
    ELSEWHERE,
    FP8_ATTENTION,
    FP8_FIELDS,
    LAYER_SPECS,
    LEFT_FIELDS,
    LEFT_SECTIONS,
    MODELS,
    OBJECTS,
    PRECISIONS,
    READ,
    SCRIPT_VALUES,
    TUNING_DATASETS,
)
from megatron_hexi.options.layer_features import ARGUMENTS, DTYPES, model_defaults
from megatron_hexi.options.parser import Row, rows_by_argument, switch_of, value_words
from megatron_hexi.yaml_file import Place, YamlFile, yaml_from_text
from megatron_hexi.yaml_schema import short

_CONTAINER = re.compile(r"^_target_:\s*['\"]?megatron\.bridge\.", re.MULTILINE)


class BridgeArguments(NamedTuple):
    """A Bridge configuration as Megatron's arguments.

    Attributes:
        text: a file of arguments, each flag on the line that its field has in the configuration.
        unread: sections and fields of the configuration that have a value and are left out of `text`.
        lora_rank: rank of the adapters that alone are trained; ``None``: all weights are.
        own_loop: what only Bridge's own loop trains; empty: Megatron's script trains all of it.
    """

    text: str
    unread: tuple[str, ...]
    lora_rank: int | None
    own_loop: str


def is_bridge(text: str) -> bool:
    """Whether a text is the YAML of a Bridge configuration."""
    return _CONTAINER.search(text) is not None


@functools.lru_cache(maxsize=4)  # a command asks for the model, the job and what is not read
def bridge_arguments(text: str, path: Path) -> BridgeArguments:
    """Translate a Bridge configuration into Megatron's arguments.

    Raises:
        HexiError: a field whose value no argument of Megatron expresses; with line, field, value and remedy.
    """
    return _Translation(yaml_from_text(path, text)).result()


class _Translation:
    """Translates one Bridge file into flags, line by line."""

    def __init__(self, file: YamlFile) -> None:
        self._file = file
        self._lines: dict[int, list[str]] = defaultdict(list)
        self._unread: list[str] = []
        self._own_loop: list[str] = []

    def result(self) -> BridgeArguments:
        rank = self._adapters()
        dataset = self._file.data.get("dataset")
        if isinstance(dataset, Mapping) and dataset.get("_target_") in TUNING_DATASETS:
            self._own_loop.append("data for fine-tuning")
        for name, section in self._file.data.items():
            if name == "peft" or (name == "dataset" and "data for fine-tuning" in self._own_loop):
                continue
            if name in READ and isinstance(section, Mapping):
                self._section(name, section)
            elif name in LEFT_SECTIONS and section:
                self._unread.append(name)
            elif name not in (*READ, *LEFT_SECTIONS, "_target_", "mixed_precision") and section not in (
                None,
                {},
                [],
            ):
                self._refuse((name,), "Megatron's script has nothing like it", "remove it from the file")
        for name in ("model", "train", "dataset"):
            if not isinstance(self._file.data.get(name), Mapping):
                self._refuse((name,), "is missing", "write Bridge's ConfigContainer with to_yaml")
        self._model()
        self._dataset()
        self._precision()
        self._weight_decay()
        last = max(self._lines, default=0)
        lines = [" ".join(map(shlex.quote, self._lines.get(line, []))) for line in range(1, last + 1)]
        return BridgeArguments(
            "\n".join([*lines, ""]), tuple(self._unread), rank, " and ".join(self._own_loop)
        )

    def _adapters(self) -> int | None:
        """Return the rank of the adapters that alone are trained; ``None``: all weights are."""
        adapters = self._file.data.get("peft")
        if adapters is None:
            return None
        usual = ADAPTERS.get(str(_target(adapters)))
        if usual is None:
            self._refuse(("peft",), "other adapters than LoRA's or DoRA's", f"read are {', '.join(ADAPTERS)}")
        rank = adapters.get("dim", usual)
        if type(rank) is not int or rank < 1:
            self._refuse(("peft", "dim"), "is no rank", "give a whole number above 0")
        self._own_loop.append("adapters on frozen weights")
        return rank

    def _section(self, section: str, fields: Mapping[str, Any]) -> None:
        for field, value in fields.items():
            place = (section, field)
            if field == "_target_" or place in ELSEWHERE or value is None or value == []:
                continue
            value = _plain(value)
            if isinstance(value, Mapping) and "_target_" in value:
                self._object(place, value)
                continue
            rows = rows_by_argument().get(ARGUMENTS.get(field, field), ())
            if place in DECIDED or (section == "model" and field in LEFT_FIELDS):
                default = rows[0].default if rows else model_defaults().get(field)
                if value and (section != "model" or value != default):
                    self._unread.append(".".join(place))
                continue
            if rows:
                self._argument(place, value, rows)
            elif section != "model":
                if value:
                    self._unread.append(".".join(place))
            elif value != SCRIPT_VALUES.get(field, model_defaults().get(field, False)):
                self._refuse(
                    place, "Megatron's command line cannot say it", "remove it, or choose another model"
                )

    def _object(self, place: Place, value: Mapping[str, Any]) -> None:
        """Name a function or object that Megatron's script makes for itself as not read; refuse any other."""
        section, field = place
        own = not str(_target(value)).startswith(OBJECTS.get(str(field), ()))
        if section != "model" or own:
            self._refuse(
                place,
                "a function or object of its own, which nothing calls here",
                "remove it, or train with a script of your own that sets it",
            )
        self._unread.append(f"{section}.{field}")

    def _argument(self, place: Place, value: Any, rows: Sequence[Row]) -> None:
        row = rows[0]
        if row.kind != "store" and isinstance(value, int):
            value = bool(value)
        if value == row.default:
            return
        if isinstance(value, bool):
            flag = switch_of(rows, value)
            if flag is None and not value and row.default is None:
                return
            if flag is None:
                self._refuse(place, f"{row.flags[0]} has no opposite", "remove the field")
            self._add(place, flag)
            return
        if row.kind != "store" or isinstance(value, Mapping):
            self._refuse(place, f"{row.flags[0]} takes no such value", "correct or remove the field")
        self._add(place, row.flags[0], *value_words(value, row))

    def _model(self) -> None:
        model = self._file.data["model"]
        target = model.get("_target_")
        if target not in MODELS:
            self._refuse(
                ("model", "_target_"), "it is another architecture", f"read are {' and '.join(MODELS)}"
            )
        spec = _target(model.get("transformer_layer_spec"))
        if spec is not None and spec not in LAYER_SPECS:
            self._refuse(("model", "transformer_layer_spec"), "layers of its own", "choose another model")
        self._activation(model)
        heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
        if groups is not None and groups != heads:
            place = ("model", "num_query_groups")
            self._add(place, "--group-query-attention", "--num-query-groups", groups)
        if model.get("num_moe_experts"):  # the only dispatcher that a plan trains with
            self._add(("model", "num_moe_experts"), "--moe-token-dispatcher-type", "alltoall")
        if model.get("share_embeddings_and_output_weights") is False:
            place = ("model", "share_embeddings_and_output_weights")
            self._add(place, "--untie-embeddings-and-output-weights")
        if model.get("vocab_size") is None:
            self._refuse(("model", "vocab_size"), "is missing", "add it")
        self._add(("model", "vocab_size"), "--vocab-size", model["vocab_size"])
        multiple = model.get("make_vocab_size_divisible_by", 128) if model.get("should_pad_vocab") else 1
        self._add(("model", "make_vocab_size_divisible_by"), "--make-vocab-size-divisible-by", multiple)
        for name in ("attention_dropout", "hidden_dropout"):
            self._add(("model", name), f"--{name.replace('_', '-')}", model.get(name, 0.1))

    def _activation(self, model: Mapping[str, Any]) -> None:
        function = _target(model.get("activation_func")) or "torch.nn.functional.gelu"
        key = (function.rpartition(".")[2], bool(model.get("gated_linear_unit")))
        if key not in ACTIVATIONS:
            gate = "with" if key[1] else "without"
            self._refuse(
                ("model", "activation_func"), f"Megatron has no flag for {key[0]} {gate} gate", "give another"
            )
        flag = ACTIVATIONS[key]
        if flag is not None:
            self._add(("model", "activation_func"), flag)

    def _dataset(self) -> None:
        dataset = self._file.data["dataset"]
        if dataset.get("_target_") not in (*DATASETS, *TUNING_DATASETS):
            self._refuse(
                ("dataset", "_target_"),
                "it is a data set of its own",
                f"read are {', '.join((*DATASETS, *TUNING_DATASETS))}",
            )
        name = "seq_length" if "seq_length" in dataset else "sequence_length"
        packs = dataset.get("offline_packing_specs") or {}
        length = packs.get("packed_sequence_size") or dataset.get(name)
        length = length or self._file.data["model"].get("seq_length")
        if packs:
            self._add(("dataset", "offline_packing_specs"), "--dataloader-inter-document-masking")
        if length is None:
            self._refuse(("dataset", "seq_length"), "is missing", "add it")
        self._add(("dataset", name), "--seq-length", length)
        positions = self._file.data["model"].get("max_position_embeddings") or length
        self._add(("dataset", name), "--max-position-embeddings", max(positions, length))
        blend = dataset.get("blend")
        if blend:
            paths, weights = blend if isinstance(blend[0], list) else (blend, None)
            words = (
                paths if weights is None else [w for pair in zip(weights, paths, strict=True) for w in pair]
            )
            self._add(("dataset", "blend"), "--data-path", *words)

    def _precision(self) -> None:
        named = self._file.data.get("mixed_precision")
        place: Place = ("mixed_precision",)
        if isinstance(named, str):
            if named not in PRECISIONS:
                remedy = f"write {', '.join(PRECISIONS)}, or its fields, with fp8_param_gather: false"
                self._refuse(place, "a plan trains in these precisions, and sends weights in 16 bits", remedy)
            self._add(place, *PRECISIONS[named])
            return
        fields = named if isinstance(named, Mapping) else self._file.data["model"]
        section = "mixed_precision" if isinstance(named, Mapping) else "model"
        if fields.get("fp4"):
            self._refuse((section, "fp4"), "a plan trains in fp32, fp16, bf16 or fp8", "write null")
        for name in ("bf16", "fp16"):
            if fields.get(name):
                self._add((section, name), f"--{name}")
        if fields.get("fp8"):
            for name in FP8_ATTENTION:
                if fields.get(name):
                    self._refuse((section, name), "a plan computes attention in 16 bits", "write false")
            if fields.get("fp8_wgrad") is False:
                self._add((section, "fp8_wgrad"), "--no-fp8-wgrad")
            for name, (flag, otherwise) in FP8_FIELDS.items():
                value = fields.get(name, otherwise)
                if value is not None and value is not False:
                    self._add((section, name), flag, *(() if value is True else (value,)))

    def _weight_decay(self) -> None:
        scheduler = self._file.data.get("scheduler") or {}
        if scheduler.get("weight_decay_incr_style", "constant") == "constant":
            return
        for name in ("start_weight_decay", "end_weight_decay"):
            if scheduler.get(name) is not None:
                self._add(("scheduler", name), f"--{name.replace('_', '-')}", scheduler[name])

    def _add(self, place: Place, *words: Any) -> None:
        known = place
        while known and known not in self._file.lines:
            known = known[:-1]
        self._lines[self._file.lines.get(known, 1)] += map(str, words)

    def _refuse(self, place: Place, why: str, remedy: str) -> NoReturn:
        value: Any = self._file.data
        for step in place:
            value = value.get(step) if isinstance(value, Mapping) else None
        told = short(_target(value) or value)
        raise HexiError(f"{self._file.where(place)}: {told}: {why}; {remedy}")


def _target(value: Any) -> str | None:
    """Return the name of a function or class; for `functools.partial` the name of its function."""
    if isinstance(value, Mapping):
        partial = value.get("_target_") == "functools.partial" and value.get("_args_")
        return _target(partial[0]) if partial else value.get("_target_")
    return value if isinstance(value, str) else None


def _plain(value: Any) -> Any:
    """Return a field's value, with torch's types and members of enumerations as Megatron names them."""
    name = value.get("_name_", value.get("_target_")) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "_name_" in value:  # a member of an enumeration
        return name
    return DTYPES.get(name, value) if isinstance(name, str) else value
