"""`--document-lengths` of `hexi plan`, `compare` and `simulate`: what reaches the planner and is said."""

import json
from pathlib import Path

import pytest

from megatron_hexi.models import read_documents
from tests.support.shell import is_one_error_line
from tests.unit.cli.conftest import ARGUMENTS, JOB

LENGTHS = "lognormal:1500,1.2,16384"


@pytest.mark.parametrize(("command", "out"), [("plan", ("-o", "plan.yaml")), ("compare", ())])
@pytest.mark.parametrize("dealt", [False, True])
def test_documents_reach_the_planner_with_how_they_are_shared(hexi, asked, command, out, dealt):
    flags = ["--batch-shares"] if dealt else []
    result = hexi(command, "cluster.yaml", *JOB, "--document-lengths", LENGTHS, *flags, *out)
    assert result.code == 0
    ((request, *_),) = asked
    documents = read_documents(LENGTHS)
    assert request.job.documents is not None
    assert (request.job.documents.lengths, request.job.documents.counts) == (
        documents.lengths,
        documents.counts,
    )
    assert request.job.documents.dealt is dealt
    assert request.micro_batch_sizes() == [1]
    said = " ".join(result.out.split())
    assert "in documents of" in said
    assert ("dealt out anew in every batch" in said) is dealt


def test_plan_as_json_says_what_sequences_hold(hexi, asked):
    Path("lengths.txt").write_text("1000 3\n4000\n")
    out = hexi(
        "plan", "cluster.yaml", *JOB, "--document-lengths", "lengths.txt", "-o", "plan.yaml", "--json"
    ).out
    found = json.loads(out)["job"]["documents"]
    assert (found["shortest"], found["longest"], found["mean"]) == (1000, 4000, 1750)
    assert found["pairs_per_sequence"] == read_documents("lengths.txt").pairs(16384)


def test_longer_documents_are_noted(hexi, asked):
    Path("lengths.txt").write_text("1000 3\n40000\n")
    result = hexi("plan", "cluster.yaml", *JOB, "--document-lengths", "lengths.txt", "-o", "plan.yaml")
    assert "25.00% of the documents are longer than a sequence of 16384 tokens" in " ".join(
        result.err.split()
    )


def test_the_time_is_that_of_documents(hexi, asked):
    hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml")
    Path("whole.txt").write_text("16384\n")
    given = ("simulate", "plan.yaml", "--cluster", "cluster.yaml", "--model", "gpt-3b", "--json")
    seconds = [
        json.loads(hexi(*given, *words).out)["iteration_s"]
        for words in ((), ("--document-lengths", "whole.txt"), ("--document-lengths", LENGTHS))
    ]
    assert seconds[1] == seconds[0]
    assert seconds[2] < 0.95 * seconds[0]


def test_packed_scripts_are_told_of_the_option(hexi, asked):
    packed = ARGUMENTS.replace("--micro-batch-size 2", "--micro-batch-size 1")
    Path("job.args").write_text(f"{packed}--dataloader-inter-document-masking --no-rope-fusion\n")
    given = ("--model", "job.args", "-o", "plan.yaml")
    assert "--document-lengths FILE" in " ".join(hexi("plan", "cluster.yaml", *given).err.split())
    result = hexi("plan", "cluster.yaml", *given, "--document-lengths", LENGTHS)
    assert "give their tokens" not in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--document-lengths", "bad.txt"), "bad.txt: line 2: 'x'"),
        (("--document-lengths", "empty.txt"), "empty.txt: holds no lengths"),
        (("--document-lengths", "absent.txt"), "absent.txt: cannot be read"),
        (("--document-lengths", "lognormal:5"), "lognormal:5"),
        (("--document-lengths", LENGTHS, "--micro-batch-size", "2"), "--micro-batch-size 2"),
        (("--document-lengths", LENGTHS, "--model", "deepseek-v3"), "latent attention"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(hexi, asked, words, said):
    Path("bad.txt").write_text("7\nx\n")
    Path("empty.txt").write_text("\n")
    result = hexi("plan", "cluster.yaml", *JOB, *words, "-o", "plan.yaml")
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert said in result.err
    assert not asked
    assert not Path("plan.yaml").exists()
