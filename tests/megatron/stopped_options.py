"""``python -m tests.megatron.stopped_options``: record which single options Megatron's own checks stop."""

from __future__ import annotations

import json
from argparse import ArgumentParser

import megatron.core

from megatron_hexi.text_file import write_text_atomically
from tests.megatron.one_rank_jobs import is_missing_here, megatron_parser, refused_by_megatron
from tests.support.one_rank_words import STOPPED, SWEPT, Stopped, all_rows, choices, job_with


def found_stopped(parser: ArgumentParser) -> list[Stopped]:
    """Return the words of each option that Megatron stops in small jobs, with what it says.

    Each option is alone, beside the words of the job.
    """
    found = []
    for words in map(" ".join, choices(all_rows())):
        said: dict[str, list[str]] = {}
        for kind in SWEPT:
            problem = refused_by_megatron(job_with(kind, words).split(), parser, held=False)
            if problem and not is_missing_here(problem):
                said.setdefault(problem, []).append(kind)
        found += [Stopped(words, kinds, problem) for problem, kinds in said.items()]
    return found


if __name__ == "__main__":
    rows = [{"megatron-core": megatron.core.__version__}]
    rows += [row._asdict() for row in found_stopped(megatron_parser())]
    write_text_atomically(STOPPED, "".join(f"{json.dumps(row)}\n" for row in rows))
