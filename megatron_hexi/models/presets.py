"""Models and jobs by the value of ``--model``: a preset, a recipe, a config.json or a file of arguments."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megatron_hexi.argument_file import Reading, located_words, read_arguments_file, replace_flags
from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models.bridge import bridge_arguments, is_bridge
from megatron_hexi.models.frameworks import ScriptArguments, script_arguments
from megatron_hexi.models.hugging_face.config import read_config
from megatron_hexi.models.hugging_face.constants import constants_of
from megatron_hexi.models.hugging_face.models import model_from_config
from megatron_hexi.models.hugging_face.routers import balancing_note, untrained_loss
from megatron_hexi.models.megatron_arguments import (
    ArgumentTerms,
    model_flags,
    model_from_arguments,
    read_arguments,
    replaced_options,
    terms_from_arguments,
    vocabulary_note,
)
from megatron_hexi.models.model import Model
from megatron_hexi.models.named_models import hub_model, preset_constants, preset_problems
from megatron_hexi.models.named_models import presets as presets
from megatron_hexi.models.recipes import recipes
from megatron_hexi.models.yaml_arguments import has_yaml_arguments, read_yaml_arguments
from megatron_hexi.plan import Plan
from megatron_hexi.shell.words import Unknowns, unplaced
from megatron_hexi.text_file import read_text
from megatron_hexi.yaml_schema import short

#: A config.json is a few kilobytes; words of megabytes take seconds to split.
MAX_BYTES = 2**17
#: Why Megatron's script does not start a job, and what does.
BRIDGE_ALONE = (
    "Megatron's pretrain_gpt.py trains nothing like it; start your script of Megatron Bridge with "
    "python -m megatron_hexi.run SCRIPT --hexi-plan PLAN.yaml"
)
#: Positions of a model that a script names; the printed lines have as many as there are tokens.
_POSITIONS = 4096


def read_model(name_or_path: str | os.PathLike[str]) -> Model:
    """Return the model that a name or a path stands for.

    Args:
        name_or_path: name of a preset or of a recipe, or path of a Hugging Face config.json, of its folder,
            of a file of Megatron's arguments or of a Megatron Bridge configuration.

    Raises:
        HexiError: there is no such preset, recipe or file, or the file lacks something or is not supported.
    """
    name = os.fspath(name_or_path)
    found = _source(name)
    if found is None:
        return presets()[name.lower()]
    path, text = found
    if _is_json(text, path):
        return model_from_config(text, path)
    given = _arguments_of(text, path)
    return model_from_arguments(given.words, path, given.faults)


def read_terms(name_or_path: str | os.PathLike[str]) -> ArgumentTerms | None:
    """Return the job of a recipe or a file of Megatron's arguments; ``None`` for other kinds of models.

    Raises:
        HexiError: see `read_model`, also of the functions below.
    """
    found = _arguments(name_or_path)
    if found is None:
        return None
    path, given = found
    return terms_from_arguments(given.words, path, given.faults, given.lora_rank)


def argument_words(name_or_path: str | os.PathLike[str]) -> list[str] | None:
    """Return the words of a recipe, or of a file of Megatron's arguments; ``None`` for other kinds.

    Raises:
        HexiError: see `read_model`.
        NoFlagError: Megatron's script does not train all that the file says.
    """
    found = _arguments(name_or_path)
    if found is None:
        return None
    path, given = found
    if given.own_loop:
        raise NoFlagError(f"{path}: {given.own_loop}: {BRIDGE_ALONE}")
    return [word.text for word in given.words]


def check_options(name_or_path: str | os.PathLike[str], plan: Plan) -> None:
    """Refuse options of a file of Megatron's arguments that a plan does not support; others have none."""
    found = _arguments(name_or_path)
    if found is not None:
        read_arguments(found[1].words, found[0], plan, found[1].faults)


def constant_flags(name_or_path: str | os.PathLike[str]) -> list[str]:
    """Return Megatron's flags for the constants of a preset or config.json; none for a file of arguments.

    Raises:
        HexiError: see `read_model`.
        NoFlagError: Megatron has no flag for a constant.
    """
    name = os.fspath(name_or_path)
    found = _source(name)
    if found is None:
        preset = name.lower()
        if preset in preset_problems():
            raise NoFlagError(
                f"{name}: Megatron has no flags for {preset_problems()[preset]}; choose another model"
            )
        return list(preset_constants()[preset])
    path, text = found
    if not _is_json(text, path):
        return []
    return [word for pair in constants_of(read_config(text, path)) for word in pair if word]


def constant_notes(name_or_path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return notes on what `constant_flags` gives and transformers trains with on request, or not at all."""
    name = os.fspath(name_or_path)
    found = _source(name)
    if found is None:
        words = preset_constants().get(name.lower(), ())
        coefficients = [value for flag, value in pairwise(words) if flag == "--moe-aux-loss-coeff"]
        why = "adds the load-balancing loss on request, if at all"
        return tuple(untrained_loss(name, why, coefficient) for coefficient in coefficients)
    if not _is_json(found[1], found[0]):
        return ()
    config = read_config(found[1], found[0])
    note = balancing_note(config, constants_of(config))
    return (note,) if note else ()


def reading_notes(name_or_path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return notes on what of a file is not read, is read as something else, or is replaced by a plan.

    They are sections and fields of a Megatron Bridge configuration, and variables and options of a file of
    arguments or of a script.

    Raises:
        HexiError: see `read_model`.
    """
    found = _source(os.fspath(name_or_path))
    if found is None or _is_json(found[1], found[0]):
        return ()
    path, text = found
    given = _arguments_of(text, path)
    replaced = replaced_options(given.words, path)
    return (
        *given.notes,
        *vocabulary_note(given.words, path),
        *(f"replaced by the plan: {line}" for line in replaced),
    )


def _arguments(name_or_path: str | os.PathLike[str]) -> tuple[Path, ScriptArguments] | None:
    """Return the file of Megatron's arguments, and these; ``None`` for other kinds of models."""
    found = _source(os.fspath(name_or_path))
    if found is None or _is_json(found[1], found[0]):
        return None
    return found[0], _arguments_of(found[1], found[0])


def _arguments_of(text: str, path: Path) -> ScriptArguments:
    """Return Megatron's arguments of a file of them, of a script or of a Megatron Bridge configuration."""
    if is_bridge(text):
        bridge = bridge_arguments(text, path)
        notes = [f"not read: {', '.join(bridge.unread)}"] if bridge.unread else []
        return ScriptArguments(located_words(bridge.text, path), notes, [], bridge.lora_rank, bridge.own_loop)
    is_yaml = has_yaml_arguments(text)
    reading = read_yaml_arguments(text, path) if is_yaml else read_arguments_file(text, path)
    return script_arguments(reading, path, _words_of_model)


def arguments_of_start(script: str, words: Sequence[str], path: Path) -> ScriptArguments:
    """Return Megatron's arguments of a training that a script has started; `path` is named in errors."""
    reading = Reading(unplaced(words), Unknowns(), [], script, None)
    return script_arguments(reading, path, _words_of_model)


def _words_of_model(name: str) -> list[str] | None:
    """Return Megatron's flags of a folder with a config.json, or of a known name, else ``None``."""
    if os.path.isfile(os.path.join(name, "config.json")):
        return replace_flags(model_flags(read_model(name), _POSITIONS), constant_flags(name))
    known = hub_model(name)
    return known and replace_flags(model_flags(known[0], _POSITIONS), known[1])


def _source(name: str) -> tuple[Path, str] | None:
    """Return the path and the untranslated text of a model's file or recipe; ``None`` for a preset."""
    path = model_file(name)
    if path is None:
        recipe = recipes().get(name.lower())
        return (Path(recipe.name), recipe.text) if recipe else None
    if not os.path.exists(path):
        raise HexiError(f"unknown model {short(name)}: it is no preset, recipe or file; {_hint(name)}")
    return path, read_text(path, MAX_BYTES)


def _is_json(text: str, path: Path) -> bool:
    return path.suffix == ".json" or text.lstrip().startswith("{")


def model_file(name: str) -> Path | None:
    """Return the file that a model is read from, which need not exist; ``None`` for a preset or a recipe.

    Names of presets and recipes may have capitals, as on Hugging Face; but if a file has exactly such a name
    with capitals, the file is meant.
    """
    low = name.lower()
    if (low in presets() or low in recipes()) and (name == low or not os.path.exists(name)):
        return None
    return Path(name, "config.json") if os.path.isdir(name) else Path(name)


def _hint(name: str) -> str:
    last = name.lower().rpartition("/")[2]  # of a name on Hugging Face, ORGANISATION/MODEL
    near = difflib.get_close_matches(last, [*presets(), *recipes()], n=3)
    known = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(presets())}"
    return (
        f"{known} (or give a Hugging Face config.json, a file of Megatron's arguments, or Megatron Bridge's "
        "run_config.yaml)"
    )
