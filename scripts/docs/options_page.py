"""The page of Megatron's options: what each is to a plan, by the rules of `megatron_hexi.options`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_hexi.options.kinds import UNSHOWN, Refused, Replaced, Supported
from megatron_hexi.options.refusals import OPTIONS
from megatron_hexi.options.registry import COUNTED, FREE, RESTRICTING, OptionClass, class_of, table

_HEAD = """\
# Megatron's options under a plan

<!-- Made from megatron_hexi/options/:
     python -m scripts.docs -->

Every option of Megatron 0.17 to 0.19 has one class; `hexi plan`, `hexi launch`, `hexi validate` and training
decide by it alike, before anything is allocated. What Megatron does not have is refused by name.

- **counted**: part of the model, the job or the plan
- **free**: no plan depends on it; the printed lines keep it
- **restricting**: some plans, or plans made by hand, train with it; the planner keeps to these, or refuses it
- **replaced**: it only chooses how fast, or in how much memory, the same function is trained; the plan does
  that in its own way, and a line says how
- **refused**: no plan trains with it, or with most of its values

Spellings of options in each class, by version (`python -m megatron_hexi.options.registry`):

```text
{table}
```

[Rules](#attention) say what is supported, and what is refused and why. Measured on the CPU: under
uneven plans, supported options give the losses and gradient norms of the same job without context
parallelism, to 1e-5 in fp32 (that job has `--calculate-per-token-loss` where tokens are masked out of the
loss). `megatron_hexi/options/` names the test of each. Where no remedy is named, train without the option.
[Lists](#counted-options) name all others.
"""
_LISTS: dict[OptionClass, tuple[str, Mapping[str, str]]] = {
    "counted": ("Counted options", COUNTED),
    "free": ("Free options", FREE),
    "restricting": ("Options read beside a restricting one", RESTRICTING),
}
_UNSTATED = "train without it"


def options_page() -> str:
    """Return the page of Megatron's options in Markdown."""
    lines = [line for title, options in OPTIONS.items() for line in _section(title, options)]
    for name in _LISTS:
        lines += _list(name)
    return _HEAD.replace("{table}", table()) + "".join(line + "\n" for line in lines)


def _list(name: OptionClass) -> Iterator[str]:
    """Yield Markdown lines with the options that `classes` lists in a class, one line for each reason."""
    title, reasons = _LISTS[name]
    yield f"\n## {title}\n"
    for reason, text in reasons.items():
        words = [word for word in text.split() if word.endswith("*") or class_of(word) == name]
        yield f"- {reason}: {', '.join(f'`{word}`' for word in words)}"


def _section(title: str, options: Sequence[Supported | Replaced | Refused]) -> Iterator[str]:
    """Yield Markdown lines of a section: supported, replaced, then one line for each reason of refusal.

    Supported options with notes have lines of their own.
    """
    yield f"\n## {title}\n"
    notes: dict[str, list[str]] = {}
    for option in options:
        if isinstance(option, Supported):
            notes.setdefault(option.note, []).append(option.flags)
    if "" in notes:
        yield f"Supported: {', '.join(map(_marked, notes.pop('')))}.\n"
    yield from (f"- {', '.join(map(_marked, flags))}: {note}" for note, flags in notes.items())
    instead: dict[str, list[str]] = {}
    for option in options:
        if isinstance(option, Replaced):
            values = f" ({option.values})" if option.values else ""
            instead.setdefault(option.instead, []).append(_marked(option.option) + values)
    yield from (f"- {', '.join(names)}: {clause}" for clause, names in instead.items())
    reasons: dict[tuple[str, str], list[str]] = {}
    for option in options:
        if isinstance(option, Refused):
            reasons.setdefault((option.reason, option.remedy), []).append(_refused(option))
    if reasons:
        yield ("\n" if notes else "") + "Refused:\n"
        for (reason, remedy), names in reasons.items():
            why = "not tested yet" if reason == UNSHOWN else reason
            what = "" if remedy == _UNSTATED else f"; {remedy.removesuffix(f', or {_UNSTATED}')}"
            yield f"- {', '.join(names)}: {why}{what}"


def _refused(option: Refused) -> str:
    """Return the flag of a refused option as Markdown, with the refused values and versions."""
    versions = f"megatron-core {option.versions}" if option.versions else ""
    values = "; ".join(filter(None, (option.values, versions)))
    return _marked(option.option) + (f" ({values})" if values else "")


def _marked(flags: str) -> str:
    """Return flags and their values as Markdown code."""
    return ", ".join(f"`{flag}`" if flag.startswith("--") else flag for flag in flags.split(", "))
