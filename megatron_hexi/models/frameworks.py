"""Megatron's arguments in the words of slime, ms-swift and verl, which have options of their own beside.

Words that say how a model is fine-tuned or rolled out are no matter of a plan, and are named in a note. What
trains something else than the model's weights, or other layers, is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from megatron_hexi.argument_file import Reading, unfilled
from megatron_hexi.models.bridge_fields import LEFT_FIELDS
from megatron_hexi.options.layer_features import ARGUMENTS
from megatron_hexi.options.parser import known_flags, rows_by_argument, switch_of, value_words
from megatron_hexi.options.registry import ELSEWHERE, class_of
from megatron_hexi.shell.words import Word, place_of

#: Scripts of slime, and options that only its files have.
_SLIME_SCRIPTS: Final = ("train.py", "train_async.py")
_SLIME: Final = re.compile(
    r"--(?:rollout-.*|hf-checkpoint|ref-load|actor-num-.*|use-gated-attention|allgather-cp|post-.*-layernorm)"
)
#: Options of slime and ms-swift that train something else, with the reason and the remedy.
_OTHER_LAYERS: Final = (
    "has norms behind attention or MLP, for which Megatron has no flags",
    "choose another model",
)
_REFUSED: Final = {
    "--post-mlp-layernorm": _OTHER_LAYERS,
    "--post-self-attn-layernorm": _OTHER_LAYERS,
    "--tuner-type": ("trains other adapters than LoRA's", "plan --tuner_type lora or full"),
    "--train-type": ("trains other adapters than LoRA's", "plan --train_type lora or full"),
    "--task-type": ("has another head than a language model", "plan a causal_lm"),
}
_HARMLESS: Final = ("full", "lora", "causal_lm", "0", "none", "null")
#: Rank of ms-swift's adapters where --lora_rank is not given.
_SWIFT_RANK: Final = "8"
#: What ms-swift's names of terms are in Megatron.
_SWIFT: Final = {"--max-length": "--seq-length", "--learning-rate": "--lr"}
#: verl's sections whose fields are Megatron's arguments or fields of its configurations.
_VERL: Final = re.compile(
    r"\+*(?:actor_rollout_ref\.actor|actor|trainer)?\.?(?:megatron|engine|optim)"
    r"(?:\.override_(?:transformer|ddp|optimizer)_config)?\.(\w+)"
)
#: Fields of these sections that have other names in Megatron, as they are in Bridge or else.
_VERL_NAMES: Final = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    **ARGUMENTS,
}


@dataclass(frozen=True)
class ScriptArguments:
    """Megatron's arguments of a file, with notes on what is left out, and messages of mistakes.

    Args:
        lora_rank: rank of the adapters that alone are trained; ``None``: all weights are.
        own_loop: what Megatron's script does not train, but the loop that the file is written for; empty:
            nothing.
    """

    words: list[Word]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    lora_rank: int | None = None
    own_loop: str = ""


class _Option(NamedTuple):
    """A flag and its values."""

    flag: Word
    values: list[Word]

    @property
    def words(self) -> list[Word]:
        return [self.flag, *self.values]

    @property
    def text(self) -> str:
        return " ".join(value.text for value in self.values)


def script_arguments(
    reading: Reading, path: Path, words_of_model: Callable[[str], list[str] | None]
) -> ScriptArguments:
    """Return Megatron's arguments of a file of them, or of a script of slime, ms-swift or verl.

    Args:
        words_of_model: returns Megatron's flags of a model by its name or folder; ``None``: it is not known.
    """
    translation = _ScriptWords(reading, path, words_of_model)
    name = os.path.basename(reading.program)
    options = list(_options(reading.words))
    if name.startswith("megatron "):
        translation.swift(options)
    elif name.startswith("verl."):
        translation.verl(reading.words)
    else:
        is_part = not name and any(_SLIME.fullmatch(one.flag.text) for one in options)
        translation.megatron(options, is_slime=is_part or name in _SLIME_SCRIPTS)
    return translation.result()


def _options(words: Iterable[Word]) -> Iterator[_Option]:
    """Yield flags with their values; words before the first flag have an empty one."""
    current = _Option(Word("", 0), [])
    for word in words:
        if word.text.startswith("--"):
            if current.flag.text or current.values:
                yield current
            name, has_value, value = word.text.partition("=")
            current = _Option(word._replace(text=name), [word._replace(text=value)] if has_value else [])
        else:
            current.values.append(word)
    if current.flag.text or current.values:
        yield current


class _ScriptWords:
    """Collects Megatron's arguments of one script."""

    def __init__(
        self, reading: Reading, path: Path, words_of_model: Callable[[str], list[str] | None]
    ) -> None:
        self._reading, self._path, self._words_of_model = reading, path, words_of_model
        self._words: list[Word] = []
        self._others: list[str] = []
        self._unfilled: list[Word] = []
        self._dropped: list[str] = []
        self._empty: list[str] = []
        self._faults: list[str] = []
        self._lora_rank: int | None = None

    def result(self) -> ScriptArguments:
        """Return what was collected."""
        reading = self._reading
        notes = []
        if reading.program and reading.where is not None:
            notes.append(f"the arguments are those of {reading.program} ({_line_of(reading.where)})")
        if self._others:
            notes.append(f"not Megatron's: {', '.join(dict.fromkeys(self._others))}")
        if reading.defaults:
            defaults = dict.fromkeys(f"{word.text} ({_line_of(word)})" for word in reading.defaults)
            notes.append(f"the environment is not read, these defaults are: {', '.join(defaults)}")
        if self._empty:
            notes.append(
                f"the environment is not read, these are empty: {', '.join(dict.fromkeys(self._empty))}"
            )
        if self._dropped:
            notes.append(
                f"left out, as only a running shell knows them: {', '.join(dict.fromkeys(self._dropped))}; "
                "give them behind -- of hexi launch"
            )
        if reading.missing and not any(word.text.startswith("--num-layers") for word in self._words):
            names = ", ".join(word.text[:60] for word in reading.missing[:8])
            place = place_of(str(self._path), list(reading.missing))
            self._faults.insert(0, f"{place}: {names}: is read here, and is not there; put it there")
        if self._unfilled:
            self._faults.insert(0, unfilled(self._unfilled, reading, self._path))
        own_loop = "" if self._lora_rank is None else "adapters on frozen weights"
        return ScriptArguments(self._words, notes, self._faults, self._lora_rank, own_loop)

    def megatron(self, options: Iterable[_Option], *, is_slime: bool) -> None:
        """Take Megatron's own options as they are, and list slime's own for a note if `is_slime`."""
        for option in options:
            flag = option.flag.text
            if is_slime and flag not in known_flags() and flag and not self._refused(option):
                if flag in ELSEWHERE:
                    self._take(option._replace(flag=option.flag._replace(text=ELSEWHERE[flag])))
                else:
                    self._others.append(flag)
            elif flag not in _REFUSED:
                self._take(option)

    def swift(self, options: Iterable[_Option]) -> None:
        """Take ms-swift's options: Megatron's with underscores, and switches with true or false."""
        given: set[str] = set()
        rank, adapts = _SWIFT_RANK, False
        for option in options:
            written = option.flag.text
            flag = written.replace("_", "-")
            flag = _SWIFT.get(flag, flag)
            given.add(flag)
            value = option.text.lower()
            rows = rows_by_argument().get(flag[2:].replace("-", "_"), ())
            adapts |= flag in ("--tuner-type", "--train-type") and value == "lora"
            if flag == "--model":
                self._model(option)
            elif self._refused(option._replace(flag=option.flag._replace(text=flag))) or value == "none":
                continue
            elif flag == "--lora-rank":
                rank = value
            elif flag == "--loss-scale":  # which tokens count, no scale of fp16
                self._others.append(written)
            elif flag == "--torch-dtype" and value in ("bfloat16", "float16"):
                given.add("--bf16")
                self._add(option.flag, "--bf16" if value == "bfloat16" else "--fp16")
            elif flag in known_flags() and flag not in (row.flags[0] for row in rows if row.kind != "store"):
                self._take(option._replace(flag=option.flag._replace(text=flag)))
            elif rows and value in ("true", "false", ""):
                switch = switch_of(rows, value != "false")
                self._add(option.flag, *([switch] if switch else []))
            else:
                self._others.append(written)
        if adapts:
            self._adapters(rank, "--lora_rank")
        self._defaults(given)

    def verl(self, words: Iterable[Word]) -> None:
        """Take verl's settings, as ``actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2``."""
        settings = {
            name.lstrip("+"): (word, value)
            for word in words
            for name, has_value, value in (word.text.partition("="),)
            if has_value
        }
        uses = [name for name in settings if re.search(r"\bmegatron\b|^engine\.", name)]
        engine = " ".join(value for _, value in settings.values())
        if not uses and "megatron" not in engine:
            where = self._reading.where or Word("", 0)
            self._faults.append(
                f"{place_of(str(self._path), [where])}: verl trains without Megatron here; give a script "
                "whose words have actor_rollout_ref.actor.megatron"
            )
        given: set[str] = set()
        used: set[str] = set()
        for name, (word, value) in settings.items():
            match = _VERL.fullmatch(name)
            if name in ("actor_rollout_ref.model.path", "model.path"):
                used.add(name)
                self._model(_Option(word._replace(text=name), [word._replace(text=value)]))
            elif name.endswith(("lora_rank", "lora.rank")) and value not in _HARMLESS:
                self._adapters(value, name)
                used.add(name)
            elif match is not None and self._verl_field(match[1], word, value, given, name):
                used.add(name)
        used |= self._verl_batch({name: value for name, (_, value) in settings.items()})
        self._others += _sections(name for name in settings if name not in used)
        self._defaults(given)

    def _verl_field(self, name: str, word: Word, value: str, given: set[str], setting: str) -> bool:
        """Return whether a field of a section of verl's is Megatron's, and take it."""
        rows = rows_by_argument().get(_VERL_NAMES.get(name, name), ())
        low = value.strip("'\"").lower()
        if low in ("null", "none", "") or not rows:
            changes = not rows and "override_transformer_config" in setting and name not in LEFT_FIELDS
            if changes and low not in ("null", "none", "", "false"):
                self._faults.append(
                    f"{place_of(str(self._path), [word])}: {setting.lstrip('+')}: Megatron's command line "
                    "cannot say it; leave it out"
                )
            return False
        if low in ("true", "false"):
            switch = switch_of(rows, low == "true")
            self._add(word, *([switch] if switch else []))
        else:
            self._take(
                _Option(
                    word._replace(text=rows[0].flags[0]),
                    [word._replace(text=text) for text in value_words(value.strip("'\""), rows[0])],
                )
            )
        given.add(rows[0].flags[0])
        return True

    def _verl_batch(self, settings: Mapping[str, str]) -> set[str]:
        """Take the length of a sequence, and the batches, and return the settings that say them."""
        prompt, response = "data.max_prompt_length", "data.max_response_length"
        batch, replies = "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n"
        micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
        place = self._reading.where or Word("", 0)
        numbers = {name: int(value) for name, value in settings.items() if value.isdigit()}
        used: set[str] = set()
        if prompt in numbers and response in numbers:
            self._add(place, "--seq-length", str(numbers[prompt] + numbers[response]))
            used |= {prompt, response}
        elif "data.max_length" in numbers:
            self._add(place, "--seq-length", str(numbers["data.max_length"]))
            used.add("data.max_length")
        if batch in numbers:  # of prompts, each with its replies
            self._add(place, "--global-batch-size", str(numbers[batch] * numbers.get(replies, 1)))
            used |= {batch, replies} & settings.keys()
        if micro in numbers and settings.get("actor_rollout_ref.actor.use_dynamic_bsz", "False") != "True":
            self._add(place, "--micro-batch-size", str(numbers[micro]))
            used.add(micro)
        return used

    def _defaults(self, given: set[str]) -> None:
        """Add what ms-swift and verl train with where nothing else is said."""
        place = self._reading.where or Word("", 0)
        own = [] if given & {"--bf16", "--fp16"} else ["--bf16"]
        own += [] if "--use-distributed-optimizer" in given else ["--use-distributed-optimizer"]
        self._add(place, *own)

    def _model(self, option: _Option) -> None:
        """Add the flags of a model that is named as on Hugging Face."""
        if self._reading.unknowns.found(option.text):
            name = self._reading.unknowns.shown(option.text)
        else:
            name = option.text
        beside = os.path.join(self._path.parent, name)
        last = os.path.basename(name.rstrip("/"))
        candidates = (beside, os.path.join(self._path.parent, last), name)
        words = next((words for candidate in candidates if (words := self._words_of_model(candidate))), None)
        if words is None:
            self._faults.append(
                f"{place_of(str(self._path), [option.flag])}: {option.flag.text} {name}: is not known by "
                f"name, and its config.json is not there; put it into {last}/ beside the script"
            )
            # One like it, so that no mistake is told that is none.
            has_experts = any("expert_model_parallel" in word.text for word in self._reading.words)
            words = self._words_of_model("mixtral-8x7b" if has_experts else "llama3-8b") or []
        self._words = [*(option.flag._replace(text=word) for word in words), *self._words]

    def _adapters(self, rank: str, setting: str) -> None:
        """Note the rank of the adapters that alone are trained."""
        if rank.isdigit() and int(rank):
            self._lora_rank = int(rank)
        else:
            place = place_of(str(self._path), [self._reading.where or Word("", 0)])
            self._faults.append(f"{place}: {setting} {rank}: is no rank; give a whole number above 0")

    def _refused(self, option: _Option) -> bool:
        """Return whether an option may train something else, and add its mistake."""
        known = _REFUSED.get(option.flag.text)
        if known is None:
            return False
        if option.text not in _HARMLESS:
            why, remedy = known
            said = f"{option.flag.text} {option.text}".strip()
            self._faults.append(f"{place_of(str(self._path), [option.flag])}: {said}: {why}; {remedy}")
        return True

    def _take(self, option: _Option) -> None:
        """Add an option, unless a part of it is not known."""
        unknowns = self._reading.unknowns
        flag = option.flag.text
        values = list(option.values)
        if values and (len(values) > 1 or not _takes_value(flag)):  # a variable behind, which adds nothing
            kept = [value for value in values if not _is_unset(value, unknowns.without_variables(value.text))]
            self._empty += [unknowns.shown(value.text) for value in values if value not in kept]
            values = kept
        option = option._replace(values=values)
        lacking = [word for word in option.words if unknowns.found(word.text)]
        if self._reading.program and not (lacking or values) and _takes_value(flag):
            lacking = [option.flag]  # of a placeholder nothing is left
        if not lacking:
            self._words += option.words
        elif flag in known_flags() and class_of(flag) == "free":
            shown = " ".join(unknowns.shown(word.text) for word in option.words)
            self._dropped.append(f"{shown[:60]} ({_line_of(lacking[0])})")
        else:
            self._unfilled += lacking

    def _add(self, place: Word, *texts: str) -> None:
        self._words += [place._replace(text=text) for text in texts]


def _line_of(word: Word) -> str:
    """Return the line of a word, with its file where that is another one."""
    return place_of("", [word]).removeprefix(", ")


def _is_unset(value: Word, filled: str | None) -> bool:
    """Return whether a word is nothing but variables that are not set."""
    return value.text != "" and filled == ""


def _takes_value(flag: str) -> bool:
    """Return whether an option of Megatron needs a value; of others it is taken to."""
    rows = [row for rows in rows_by_argument().values() for row in rows if flag in row.flags]
    return not rows or rows[0].kind == "store"


def _sections(names: Iterable[str]) -> list[str]:
    """Return names of settings; those of one section as one."""
    found: dict[str, list[str]] = {}
    for name in names:
        section = ".".join(name.split(".")[: 2 if name.startswith("actor_rollout_ref") else 1])
        found.setdefault(section, []).append(name)
    return [
        names[0] if len(names) == 1 else f"{section}.* ({len(names)})" for section, names in found.items()
    ]
