"""The goodput benchmark: failures that are drawn, the figures of a trial, and the page."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.goodput.__main__ import main
from benchmarks.goodput.failures import KINDS, draw_failures
from benchmarks.goodput.job import NODES
from benchmarks.goodput.page import write_page
from benchmarks.goodput.results import Blow, Goodput, Predicted, Settings, Trial, read_result, result_text


@given(iterations=st.integers(1, 2000), every=st.integers(3, 200), seed=st.integers(0, 2**32))
def test_failures_of_every_kind_come_at_random_moments(iterations, every, seed):
    failures = draw_failures(iterations, every, seed)
    assert failures == draw_failures(iterations, every, seed)
    moments = [failure.iteration for failure in failures]
    assert moments == sorted(set(moments))
    assert all(0 < moment < iterations for moment in moments)
    assert abs(len(failures) - iterations / every) <= 1.5
    assert all(abs(moment - every * n) <= every / 3 for n, moment in enumerate(moments, start=1))
    counts = Counter(failure.kind for failure in failures)
    assert max(counts.values(), default=0) - min(counts[kind] for kind in KINDS) <= 1
    for failure in failures:
        assert 0 <= failure.part < 1
        assert set(failure.nodes) <= NODES.keys()
        assert len(set(failure.nodes)) == len(failure.nodes) == 1 + (failure.kind == "two")


def test_other_seeds_draw_other_failures():
    assert len({str(draw_failures(200, 30, seed)) for seed in range(20)}) == 20


def course(*runs: tuple[float, range], every: float = 2.0) -> list[tuple[float, int]]:
    """Iterations of several runs, each from a second on."""
    return [(begin + every * n, iteration) for begin, run in runs for n, iteration in enumerate(run)]


def trial(done: list[tuple[float, int]], *blows: Blow, begins: tuple[tuple[int, int], ...] = ()) -> Trial:
    return Trial(done[-1][0], done, [1 / iteration for _, iteration in done], list(blows), list(begins))


SETTINGS = Settings(
    job="sick",
    iterations=20,
    every=10,
    seed=1,
    batch=4,
    repair_s=20.0,
    speed=1.0,
    save_interval=5,
    copy_interval=2,
    lost_after_s=8.0,
    machine={"cores": "2", "cpu": "some CPU", "python": "3.12", "torch": "2", "megatron-core": "0.18"},
    date="2026-01-01",
)
STILL = trial(course((12.0, range(1, 21))))
#: Ten iterations; then one that was killed, 9 s of nothing, and two that are done again.
HURT = trial(
    course((12.0, range(1, 11)), (41.0, range(9, 21))),
    Blow("rank", ("n1",), 10, 31.0, 2.5),
    begins=((9, 32),),
)
RESTARTED = trial(course((12.0, range(1, 11)), (61.0, range(6, 21))), Blow("rank", ("n1",), 10, 31.0, 2.0))
GOODPUT = Goodput(SETTINGS, STILL, HURT, RESTARTED)


def test_figures_of_a_trial():
    assert STILL.iteration_s == 2
    assert STILL.began_s == 10
    assert (STILL.again(), HURT.again(), RESTARTED.again()) == (0, 2, 5)
    # 10 s until iteration 9 has ended again, then 10 and 11.
    assert HURT.regained_s() == [14]
    assert HURT.stopped_s() == [8]
    assert HURT.restart_s() == 8
    assert (STILL.regained_s(), STILL.stopped_s(), STILL.restart_s()) == ([], [], 0)
    assert GOODPUT.part(HURT) == pytest.approx(50 / 63)
    assert GOODPUT.trained_part(HURT) == pytest.approx(40 / 53)
    assert GOODPUT.trained_part(STILL) == 1


def test_what_is_wrong_is_named():
    assert GOODPUT.problems() == []

    def problems(**changed):
        return dataclasses.replace(GOODPUT, elastic=dataclasses.replace(HURT, **changed)).problems()

    losses = [*HURT.losses[:-1], HURT.losses[-1] * (1 + 3e-5)]
    assert problems(losses=losses) == ["elastic: a loss differs by 3.0e-05"]
    assert problems(losses=[*HURT.losses[:-1], HURT.losses[-1] * (1 + 3e-6)]) == []
    assert problems(begins=[(9, 36)]) == ["elastic: iteration 9 began with sample 36"]
    assert problems(begins=[]) == ["elastic: nobody said which samples iterations [9] began with"]
    kept = [n for n, (_, iteration) in enumerate(HURT.done) if iteration != 15]
    gap = {"done": [HURT.done[n] for n in kept], "losses": [HURT.losses[n] for n in kept]}
    assert problems(**gap)[0] == "elastic: iterations [15] were not done"


def test_results_are_read_as_they_were_written_and_the_page_shows_them(tmp_path):
    whole = dataclasses.replace(
        GOODPUT, predicted_run=Predicted(0.81, 0.5), predicted_week=Predicted(0.97, 0.8)
    )
    (tmp_path / "goodput.json").write_text(result_text(whole))
    assert read_result(tmp_path / "goodput.json", Goodput).elastic.begins == HURT.begins
    write_page([read_result(tmp_path / "goodput.json", Goodput)], tmp_path)
    page = (tmp_path / "goodput.md").read_text()
    assert "| `megatron_hexi.elastic` | 63 s | 79.4% | 75.5% | 2 | 0.0e+00 |" in page
    assert "| a rank | 10 | 14.0 | 2.5 | 40.0 | 2.0 |" in page
    assert "| the sick job | 75.5% | 81.0% |" in page
    assert "## A sick job" in page
    assert "began iteration 9 with 32 of the one order" in page
    assert (tmp_path / "goodput" / "courses.png").stat().st_size > 10_000


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m benchmarks.goodput --iterations" in capsys.readouterr().out
