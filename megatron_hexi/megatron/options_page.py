"""``python -m megatron_hexi.megatron.options_page > docs/options.md``: the page of Megatron's options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hexi.megatron.options import OPTIONS
from megatron_hexi.megatron.options.kinds import UNSHOWN, Refused, Supported

_HEAD = """\
# Megatron's options under a plan

<!-- Made from megatron_hexi/megatron/options/:
     python -m megatron_hexi.megatron.options_page > docs/options.md -->

Every option of Megatron 0.17 to 0.19 that meets context parallelism is supported, or refused by name before
anything is allocated. Measured on the CPU: under uneven plans, supported options give the losses and gradient
norms of the same job without context parallelism, to 1e-5 in fp32 (that job has `--calculate-per-token-loss`
where tokens are masked out of the loss). `megatron_hexi/megatron/options/` names the test of each. Where no
remedy is named, train without the option.
"""
_UNSTATED = "train without it"


def page() -> str:
    """The page, in Markdown."""
    return _HEAD + "".join(
        line + "\n" for title, options in OPTIONS.items() for line in _section(title, options)
    )


def _section(title: str, options: Sequence[Supported | Refused]) -> Iterator[str]:
    """Supported options, those with a note in lines of their own; refused ones, a line for each reason."""
    yield f"\n## {title}\n"
    notes: dict[str, list[str]] = {}
    for option in options:
        if isinstance(option, Supported):
            notes.setdefault(option.note, []).append(option.flags)
    if "" in notes:
        yield f"Supported: {', '.join(map(_marked, notes.pop('')))}.\n"
    yield from (f"- {', '.join(map(_marked, flags))}: {note}" for note, flags in notes.items())
    reasons: dict[tuple[str, str], list[str]] = {}
    for option in options:
        if isinstance(option, Refused):
            reasons.setdefault((option.reason, option.remedy), []).append(_refused(option))
    if reasons:
        yield ("\n" if notes else "") + "Refused:\n"
        for (reason, remedy), names in reasons.items():
            why = "not tested yet" if reason == UNSHOWN else reason
            instead = "" if remedy == _UNSTATED else f"; {remedy.removesuffix(f', or {_UNSTATED}')}"
            yield f"- {', '.join(names)}: {why}{instead}"


def _refused(option: Refused) -> str:
    """The flag, with the values and versions in which it is refused."""
    versions = f"megatron-core {option.versions}" if option.versions else ""
    values = "; ".join(filter(None, (option.values, versions)))
    return _marked(option.option) + (f" ({values})" if values else "")


def _marked(flags: str) -> str:
    """Flags, with their values, as code."""
    return ", ".join(f"`{flag}`" if flag.startswith("--") else flag for flag in flags.split(", "))


if __name__ == "__main__":
    print(page(), end="")
