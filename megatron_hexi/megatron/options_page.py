"""``python -m megatron_hexi.megatron.options_page > docs/options.md``: the page of Megatron's options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hexi.megatron.options import OPTIONS
from megatron_hexi.megatron.options.kinds import Refused, Supported

_HEAD = """\
# Megatron's options under a plan

<!-- Made from megatron_hexi/megatron/options/:
     python -m megatron_hexi.megatron.options_page > docs/options.md -->

Measured: each supported option has a test of real training, on the CPU.

Every option of Megatron 0.17 to 0.19 that meets context parallelism is supported or refused by name, with a
reason and a remedy, before anything is allocated. Supported: under uneven plans, losses and gradient norms
equal those of the same job without context parallelism, to 1e-5 in fp32. That job has
`--calculate-per-token-loss` where tokens are masked out of the loss, as a plan always does. `pytest -k CASE`
with a name of the last column runs the test; refusals are tested in
[test_option_refusals.py](../tests/megatron/test_option_refusals.py).
"""
_UNSTATED = "train without it"


def page() -> str:
    """The page, in Markdown."""
    return _HEAD + "".join(
        line + "\n" for title, options in OPTIONS.items() for line in _section(title, options)
    )


def _section(title: str, options: Sequence[Supported | Refused]) -> Iterator[str]:
    """Supported options, a row for each test; refused ones, a row for each reason."""
    yield f"\n## {title}\n"
    supported = [option for option in options if isinstance(option, Supported)]
    if supported:
        yield "| supported | | test |\n|---|---|---|"
        shown: dict[tuple[str, str], list[str]] = {}
        for one in supported:
            shown.setdefault((one.note, one.test), []).append(_marked(one.flags))
        for (note, test), flags in shown.items():
            yield f"| {', '.join(flags)} | {note} | {_case(test)} |"
    reasons: dict[tuple[str, str], list[str]] = {}
    for option in options:
        if isinstance(option, Refused):
            reasons.setdefault((option.reason, option.remedy), []).append(_refused(option))
    if reasons:
        yield ("\n" if supported else "") + "| refused | because | instead |\n|---|---|---|"
        for (reason, remedy), names in reasons.items():
            yield f"| {', '.join(names)} | {reason} | {'' if remedy == _UNSTATED else remedy} |"


def _refused(option: Refused) -> str:
    """The flag, with the values and versions in which it is refused."""
    versions = f"megatron-core {option.versions}" if option.versions else ""
    values = "; ".join(filter(None, (option.values, versions)))
    return _marked(option.option) + (f" ({values})" if values else "")


def _marked(flags: str) -> str:
    """Flags, with their values, as code."""
    return ", ".join(f"`{flag}`" if flag.startswith("--") else flag for flag in flags.split(", "))


def _case(test: str) -> str:
    """The name of the test's case, or of its function."""
    function, _, case = test.rpartition("::")[2].partition("[")
    return f"`{case.removesuffix(']') or function}`"


if __name__ == "__main__":
    print(page(), end="")
