"""``python -m megatron_hexi.megatron.options_page > docs/options.md``: the page of Megatron's options."""

from __future__ import annotations

from megatron_hexi.megatron.options import OPTIONS
from megatron_hexi.megatron.options.kinds import Supported

_HEAD = """\
# Megatron's options beside a plan

<!-- Made from megatron_hexi/megatron/options/:
     python -m megatron_hexi.megatron.options_page > docs/options.md -->

Every option of Megatron 0.17 to 0.19 that meets context parallelism is either carried out or refused by
name, with a reason and a remedy, before anything is allocated. **yes**: under uneven plans the losses and
gradient norms of real training are, to 1e-5 in fp32, those of the same job without context parallelism.
Where tokens are masked out of the loss, that job has `--calculate-per-token-loss` too, which a plan
always sets: without it Megatron takes the mean of the means of micro-batches. The last column names the
test that shows it; those of refused options assert the message.
"""


def page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    for title, options in OPTIONS.items():
        parts.append(
            f"\n## {title}\n\n| option | with a plan | what else to know | test |\n|---|---|---|---|\n"
        )
        for option in options:
            if isinstance(option, Supported):
                name, answer, note = _marked(option.flags), "**yes**", option.note
            else:
                versions = f"megatron-core {option.versions}" if option.versions else ""
                values = ", ".join(filter(None, (option.values, versions)))
                name, answer = _marked(option.option) + (f": {values}" if values else ""), "refused"
                note = f"{option.reason}; {option.remedy}"
            parts.append(f"| {name} | {answer} | {note} | {_linked(option.test)} |\n")
    return "".join(parts)


def _marked(flags: str) -> str:
    """Flags, with their values, as code."""
    return ", ".join(f"`{flag}`" if flag.startswith("--") else flag for flag in flags.split(", "))


def _linked(test: str) -> str:
    """A test's file as a link, and which of its cases."""
    path, _, name = test.partition("::")
    function, _, case = name.partition("[")
    return f"[{case.removesuffix(']') or function}](../{path})"


if __name__ == "__main__":
    print(page(), end="")
