"""The measurement of what commands take runs, and notices a command that ends otherwise than it should."""

from dataclasses import replace

import pytest

from benchmarks import answers
from benchmarks.answers import main, measure, questions


def test_every_refusal_is_asked_for(tmp_path):
    asked = list(questions(tmp_path))
    assert len(asked) == 2 + len(answers.BROKEN)
    refused = [question for question in asked if question.words[0] == "plan"]
    assert {question.code for question in refused} == {2}
    seconds = [measure(question, repeats=1).seconds for question in refused[:1]]
    assert min(seconds) > 0


def test_another_end_is_an_error(tmp_path):
    question = next(one for one in questions(tmp_path) if one.words[0] == "plan")
    with pytest.raises(RuntimeError, match=r"an unknown GPU: exit code 2\nhexi: error: .*in the catalogue"):
        measure(replace(question, code=0), repeats=1)


def test_what_takes_too_long_is_said(monkeypatch, capsys):
    monkeypatch.setattr(answers, "questions", lambda folder: ["slow", "quick"])
    monkeypatch.setattr(
        answers, "measure", lambda name: answers.Answer(name, 2.5 if name == "slow" else 1, 2)
    )
    assert main([]) == 0
    slow, quick = capsys.readouterr().out.splitlines()
    assert slow.endswith("2.50 s of 2 s  too long")
    assert quick.endswith("1.00 s of 2 s")
