"""Names that options had before they took Megatron's: read for one more release, not shown by ``--help``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron_hexi.cli.output import say
from megatron_hexi.plan.flags import flag_name

#: Former names, by the field that the option is for.
_FORMER = {
    "tensor_parallel": "--tensor-parallel",
    "pipeline_parallel": "--pipeline-parallel",
    "data_parallel": "--data-parallel",
    "recompute": "--recompute",
    "distributed_optimizer": "--distributed-optimizer",
    "overlap_gradients": "--overlap-gradients",
    "heads": "--heads",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "value_dim": "--value-dim",
    "hidden_size": "--hidden",
}


def _renamed() -> Iterator[tuple[str, str]]:
    for field, former in _FORMER.items():
        name = flag_name(field)
        yield former, name
        yield former.replace("--", "--no-", 1), name.replace("--", "--no-", 1)


RENAMED = dict(_renamed())


def with_present_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Replace former names of options in a command's words, with a note on standard error for each.

    Args:
        words: the command line; words after ``--`` are another program's.
        options: names that the command has today.
    """
    end = words.index("--") if "--" in words else len(words)
    present_words = list(words)
    for place, word in enumerate(words[:end]):
        former, equals, value = word.partition("=")
        name = RENAMED.get(former)
        if name in options and former not in options:
            say(f"note: {former} is now {name}, as in Megatron; the next release reads only that")
            present_words[place] = f"{name}{equals}{value}"
    return present_words
