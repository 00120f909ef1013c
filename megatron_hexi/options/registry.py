"""The class of every option of Megatron (counted, free, restricting, replaced or refused).

``python -m megatron_hexi.options.registry`` prints the number of options in each class, by version.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, get_args

from megatron_hexi.options.classes import COUNTED, FREE, RESTRICTING
from megatron_hexi.options.parser import HEXI_ROWS, read_rows
from megatron_hexi.options.refusals import refused, replaced
from megatron_hexi.options.release import VERSIONS, assumed_series

#: Classes of options. `counted`: part of the model, the job or the plan. `free`: without influence on plans.
#: `restricting`: allowed with some plans. `replaced`: the plan does the same in its own way. `refused`:
#: refused by name.
OptionClass = Literal["counted", "free", "restricting", "replaced", "refused"]

#: Flags that printed command lines add if a job lacks them, since no plan trains with Megatron's default.
ADDED: Final = {"--attention-dropout": "0", "--hidden-dropout": "0", "--eval-iters": "0"}


def class_of(flag: str) -> OptionClass:
    """Return the class of an option."""
    return class_and_reason(flag)[0]


def class_and_reason(flag: str) -> tuple[OptionClass, str]:
    """Return the class of an option, and the reason for this class.

    Raises:
        LookupError: the option has no class, or two classes.
    """
    spellings = _spellings()
    named = {answer for spelling in spellings[flag] for answer in _named(spelling)}
    if len(named) != 1:
        raise LookupError(f"{flag}: is to have one class, has {sorted(named) or 'none'}")
    return named.pop()


@functools.cache
def _spellings() -> Mapping[str, tuple[str, ...]]:
    """Return, for each spelling of an option, all spellings of options that set the same argument."""
    rows: dict[str, set[str]] = {}
    for row in (*read_rows(), *HEXI_ROWS):
        rows.setdefault(row.dest, set()).update(row.flags)
    return {flag: tuple(sorted(flags)) for flags in rows.values() for flag in flags}


def counts() -> Mapping[str, Counter[OptionClass]]:
    """Return, for each version of Megatron, the number of spellings of options in each class."""
    return {
        version: Counter(
            class_of(flag) for row in read_rows() if version in row.versions for flag in row.flags
        )
        for version in VERSIONS
    }


def _named(flag: str) -> list[tuple[OptionClass, str]]:
    """Return each class to which a flag belongs by a rule or a list, with the reason."""
    rules = [rule for rule in refused() if rule.option == flag]
    planning = [rule for rule in rules if rule.beside not in ("any", "script")]
    for rule in rules:
        if rule.beside == "any" and not rule.values and not rule.versions:
            return [("refused", rule.reason)]
    if planning:
        return [
            (
                "restricting",
                "not beside " + ", ".join(dict.fromkeys(rule.conflicts_with for rule in planning)),
            )
        ]
    instead = [rule.instead for rule in replaced() if rule.option == flag and rule.replaces_itself]
    if instead:
        return [("replaced", instead[0])]
    return _listed(flag) or [("refused", rule.reason) for rule in rules[:1]]


def _listed(flag: str) -> list[tuple[OptionClass, str]]:
    """Return the classes whose lists name a flag, or else the beginning of the flag, with the reason."""
    lists: tuple[tuple[OptionClass, Mapping[str, str]], ...] = (
        ("counted", COUNTED),
        ("free", FREE),
        ("restricting", RESTRICTING),
    )
    words = [
        (word, (name, reason))
        for name, reasons in lists
        for reason, text in reasons.items()
        for word in text.split()
    ]
    exact = [answer for word, answer in words if word == flag]
    return exact or [answer for word, answer in words if word[-1] == "*" and flag.startswith(word[:-1])]


def table() -> str:
    """Return a text table of the number of options in each class, by version of Megatron."""
    names: tuple[OptionClass, ...] = get_args(OptionClass)
    lines = ["Megatron  " + "  ".join(f"{name:>11}" for name in (*names, "all"))]
    for version, version_counts in counts().items():
        numbers = [*(version_counts[name] for name in names), version_counts.total()]
        lines.append(f"{version:8}  " + "  ".join(f"{number:11}" for number in numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())


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
