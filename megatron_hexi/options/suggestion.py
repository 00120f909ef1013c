"""Suggest an option of Megatron in place of a flag that Megatron does not have."""

from __future__ import annotations

import difflib

from megatron_hexi.options.parser import HEXI_ROWS, read_rows
from megatron_hexi.options.registry import class_of
from megatron_hexi.options.release import assumed_series

#: Flags of other programs that mean an option of Megatron (slime's model files).
ELSEWHERE = {"--use-gated-attention": "--attention-output-gate"}
_NEGATIONS = {"no", "disable"}


def nearest_option(flag: str) -> str | None:
    """Return the option that a flag may be a misspelling of; ``None``: no plan trains with one like it."""
    rows = [row for row in (*read_rows(), *HEXI_ROWS) if assumed_series() in row.versions]
    known = [spelling for row in rows for spelling in row.flags]
    near = [ELSEWHERE[flag]] if flag in ELSEWHERE else difflib.get_close_matches(flag, known, 5, 0.8)
    alike = (option for option in near if flag in ELSEWHERE or _is_misspelt(flag, option))
    return next((option for option in alike if option in known and class_of(option) != "refused"), None)


def _is_misspelt(flag: str, option: str) -> bool:
    """Return whether the words of a flag are an option's, but for misspellings or some that are left out."""
    words, others = (text.removeprefix("--").split("-") for text in (flag, option))
    added = [word for word in words if word not in others]
    missing = [word for word in others if word not in words]
    if _NEGATIONS & {*added, *missing}:
        return False
    if not added or not missing:
        return True
    if len(added) == len(missing):
        return all(_ratio(*pair) >= 0.6 for pair in zip(added, missing, strict=True))
    return _ratio("".join(words), "".join(others)) >= 0.9


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
