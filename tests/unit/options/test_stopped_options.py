"""``hexi plan`` refuses by name each option that alone stops Megatron on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hexi.argument_file import located_words
from megatron_hexi.cli.options import NewJob
from megatron_hexi.errors import HexiError
from megatron_hexi.options.parser import parse_and_judge
from megatron_hexi.options.refusals import find_refused, replaced
from tests.support.one_rank_words import SWEPT, all_rows, choices, job_with, read_stopped

_STAGES = "the plan says which stages and chunks there are"
_RANKS = "the plan says which ranks share a sequence, a weight or the experts"
#: Options that a file for ``hexi plan`` may have although Megatron stops one rank with them, each with why;
#: those that a plan replaces are others.
TAKEN = {
    "--context-parallel-size": _RANKS,
    "--cuda-graph-modules": "its names are not recorded, and plans refuse --cuda-graph-impl",
    "--cuda-graph-scope": "its names are not recorded, and plans refuse --cuda-graph-impl",
    "--decoder-first-pipeline-num-layers": _STAGES,
    "--decoder-last-pipeline-num-layers": _STAGES,
    "--max-position-embeddings": "hexi launch raises it to the sequence, unless positions are learned",
    "--num-layers-per-virtual-pipeline-stage": _STAGES,
    "--num-virtual-stages-per-pipeline-rank": _STAGES,
    "--pipeline-model-parallel-layout": _STAGES,
    "--pipeline-model-parallel-size": _STAGES,
    "--save": "hexi launch and hexi slurm-arguments add --save-interval",
}


def refusal(kind: str, words: str, folder) -> str:
    """Return what ``hexi plan`` says against a file of these words; empty where it plans."""
    file = folder / "job.args"
    file.write_text(job_with(kind, words).replace(" --", "\n--"), encoding="utf-8")
    try:
        NewJob(model=str(file)).request()
    except HexiError as problem:
        return str(problem)
    return ""


def stopped(kinds: int) -> list[tuple[str, str]]:
    """Return jobs that Megatron stops, by kind and words; of kinds that it stops alike, so many."""
    return [(kind, row.words) for row in read_stopped() for kind in row.jobs[:kinds]]


@pytest.mark.parametrize("kinds", [1, pytest.param(len(SWEPT), marks=pytest.mark.slow)])
def test_what_megatron_stops_is_stopped_before_a_job_starts(kinds, tmp_path):
    jobs = stopped(kinds)
    assert len(jobs) > 180 * kinds
    taken = set()
    for kind, words in jobs:
        said, flag = refusal(kind, words, tmp_path), words.split()[0]
        if not said:
            taken.add(flag)
        assert not said or flag in said, f"{words} is not named: {said}"
    assert (
        taken - {rule.option for rule in replaced()} == TAKEN.keys()
    )  # no reason is given for what is stopped, either


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWEPT)
def test_what_megatron_takes_is_not_said_to_be_refused_by_it(kind):
    stopped_words = {row.words for row in read_stopped() if kind in row.jobs}
    source, refused = Path("job.args"), set()
    for words in set(map(" ".join, choices(all_rows()))) - stopped_words:
        parsed, _ = parse_and_judge(located_words(job_with(kind, words), source), str(source))
        rules = find_refused(parsed.args, "planned")
        refused |= {rule.option for rule in rules if rule.reason.startswith("Megatron refuses")}
    # Megatron refuses this one in words that also tell of a missing device.
    assert refused <= {"--inference-cuda-graph-scope"}


@pytest.mark.parametrize("kind", SWEPT)
def test_a_job_without_more_is_planned(kind, tmp_path):
    assert refusal(kind, "", tmp_path) == ""
