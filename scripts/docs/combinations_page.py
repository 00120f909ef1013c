"""The page of what goes with what: a table of kinds of models by features, and the reasons of refusals."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.docs.combination_tests import IMPOSSIBLE, NOTES, TESTS
from scripts.docs.combinations import FEATURES, KINDS, refusal
from scripts.docs.markdown import GENERATED_FROM, code

_HEAD = f"""\
# What goes with what

{GENERATED_FROM.format(source="scripts/docs/combinations.py and scripts/docs/combination_tests.py")}

Kinds of models by features of plans. **yes**: trained, or planned, as the test [below](#tests) shows. **not
yet**, **no**: refused by name before anything is allocated; with its [reason](#refused), which is what the
code says when it is asked for the combination. [Megatron's options](../options.md) are checked one by one.
Images are those of vision-language models in Megatron Bridge's loop
([images](../megatron-bridge.md#images)); they train in [one of your own](../own-loop.md#images) too.

"""


def combinations_page() -> str:
    """Return the page, in Markdown."""
    return _HEAD + "".join(line + "\n" for line in (*_table(), *_notes(), *_refusals(), *_tests()))


def answer(kind: str, feature: str) -> str:
    """Return the cell of a combination: ``yes``, ``not yet`` or ``no``."""
    if refusal(kind, feature) is None:
        return "yes"
    return "no" if (kind, feature) in IMPOSSIBLE else "not yet"


def _table() -> Iterator[str]:
    yield "| | " + " | ".join(title for title, _ in FEATURES.values()) + " |"
    yield "|---" * (len(FEATURES) + 1) + "|"
    for name, kind in KINDS.items():
        cells = (answer(name, feature) for feature in FEATURES)
        yield f"| {kind.title} | " + " | ".join(cells) + " |"


def _notes() -> Iterator[str]:
    yield ""
    for (kind, feature), note in NOTES.items():
        yield f"- {_name(kind, feature)}: {note}"


def _refusals() -> Iterator[str]:
    """Yield refusals, a line for each reason."""
    yield "\n## Refused\n"
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind, of_kind in KINDS.items():
        for feature, (title, _) in FEATURES.items():
            reason = refusal(kind, feature)
            if reason is not None:
                key = f"{of_kind.title}, {answer(kind, feature)}", reason
                reasons.setdefault(key, []).append(_plain(title))
    for (said, reason), titles in reasons.items():
        yield f"- {said}, {', '.join(titles)}: {code(reason)}"


def _tests() -> Iterator[str]:
    yield "\n## Tests\n"
    for kind, of_kind in KINDS.items():
        named: dict[str, list[str]] = {}
        for feature, test in TESTS[kind].items():
            named.setdefault(test, []).append(_plain(FEATURES[feature][0]))
        for test, titles in named.items():
            yield f"- {of_kind.title}, {', '.join(titles)}: {code(test)}"


def _name(kind: str, feature: str) -> str:
    return f"{KINDS[kind].title}, {_plain(FEATURES[feature][0])}"


def _plain(title: str) -> str:
    return title.replace("&shy;", "")
