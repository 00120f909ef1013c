"""`hexi report`: figures against the record, and the page against the figures."""

import dataclasses
import functools
import json
import re

import pytest

from megatron_hexi.cost import estimate
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
from megatron_hexi.plan import Estimate, proportional_plan, write_plan
from megatron_hexi.record import RankTimes, Round, read_record
from megatron_hexi.report import describe_run, run_report
from megatron_hexi.report.run_page import run_page
from megatron_hexi.report.run_summary import RunSpeed
from tests.support.costs import cluster
from tests.support.html import Page
from tests.support.records import GIB, JOB, PLAN, interval, start, write_record
from tests.support.shell import call_hexi, is_one_error_line

MACHINES = cluster([("fast", "DOUBLE", 1), ("slow", "PLAIN", 1)])
#: The first iteration of a start is slow, and counts in no mean.
INTERVALS = (
    interval(1, seconds=9.0),
    interval(2, 3, seconds=2.0, waits=(0.5, 0.25)),
    interval(4, seconds=5.0, waits=(0.2, 1.0), peaks=(4 * GIB, 2 * GIB)),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


@pytest.fixture
def record(path):
    return read_record(write_record(path, start(), *INTERVALS))


def test_a_notebook_shows_a_run_as_html(record):
    shown = run_report(describe_run(record, PLAN))._repr_html_()
    assert shown.startswith("<pre")
    assert "GPU one" in shown


def test_means_are_over_iterations_but_each_start_s_first(record):
    run = describe_run(record, PLAN, None)
    assert (run.iterations, run.seconds) == ((1, 2, 3, 4), (9.0, 2.0, 2.0, 5.0))
    assert run.losses == (10.0, 5.0, 10 / 3, 2.5)
    assert (run.timed, run.starts) == (3, 1)
    assert run.measured.iteration_s == pytest.approx(9 / 3)
    assert run.measured.tokens_per_s == pytest.approx(8192 * 3 / 9)
    first, second = run.ranks
    assert first.attention_s == pytest.approx((0.5 * 2 + 0.2) / 3)
    assert first.gradients_s == second.gradients_s == pytest.approx(0.25)
    assert first.busy_s == pytest.approx((1.25 * 2 + 4.55) / 3)
    assert first.idle_share == pytest.approx((0.75 * 2 + 0.45) / 9)
    assert second.idle_share == pytest.approx((0.5 * 2 + 1.25) / 9)
    assert run.measured.idle_share == pytest.approx((first.idle_share + second.idle_share) / 2)
    assert (first.peak_gib, second.peak_gib) == (4, 2)
    assert (first.tokens, second.tokens) == (3072, 1024)
    assert (first.device, second.device) == ("GPU one", "GPU two")
    assert run.predicted is None
    assert any("3 iterations from 2 to 4, the slowest took 5 s" in note for note in run.notes)


@pytest.mark.parametrize(
    ("planned", "loads", "said"),
    [
        (
            None,
            (0.9, 0.7, 0.4),
            "vary by 0.60 (standard deviation over mean), planned for 0.20; plan again with ",
        ),
        (0.6, (0.9, 0.7, 0.4), "vary by 0.60 (standard deviation over mean), planned for 0.60"),
        (0.6, (None, None, None), None),
    ],
)
def test_loads_of_experts_stand_beside_those_that_were_planned_for(path, planned, loads, said):
    """Two iterations of 0.7 and one of 0.4; the first interval warms up."""
    plan = dataclasses.replace(PLAN, job=dataclasses.replace(PLAN.job, expert_imbalance=planned))
    told = [dataclasses.replace(one, expert_imbalance=n) for one, n in zip(INTERVALS, loads, strict=True)]
    run = describe_run(read_record(write_record(path, start(plan), *told)), plan, None)
    notes = [note for note in run.notes if note.startswith("loads of experts")]
    if said is None:
        assert (run.expert_imbalance, run.assumed_imbalance, notes) == (None, None, [])
        return
    assert run.expert_imbalance == pytest.approx(0.6)
    assert run.assumed_imbalance == (planned or 0.2)
    assert said in notes[0]
    assert notes[0].endswith("planned for 0.60" if planned else "hexi plan --expert-imbalance 0.60")


def test_a_single_interval_counts(path):
    run = describe_run(read_record(write_record(path, start(), interval(1))), PLAN, None)
    assert (run.timed, run.measured.iteration_s) == (1, 2.0)
    assert any("the first one is among them" in note for note in run.notes)


def test_predictions_are_the_cost_model_s(record):
    cost = estimate(PLAN, JOB, MACHINES)
    run = describe_run(record, PLAN, cost)
    assert run.predicted is not None
    assert run.predicted.iteration_s == cost.iteration_s
    assert run.predicted.tokens_per_s == cost.tokens_per_s
    for found, rank in zip(run.ranks, cost.ranks, strict=True):
        assert found.predicted_busy_s == rank.compute_s
        assert found.predicted_wait_s == pytest.approx(cost.iteration_s - rank.compute_s)
        assert (found.predicted_gib, found.usable_gib) == (rank.memory_gib, 64)
    waits = sum(cost.iteration_s - rank.compute_s for rank in cost.ranks)
    assert run.predicted.idle_share == pytest.approx(waits / 2 / cost.iteration_s)
    assert run.ranks[0].device == "DOUBLE (fast-0/0)"


def test_without_a_cluster_the_plan_s_own_estimate_is_shown(path):
    known = Estimate(iteration_s=1.5, tokens_per_s=5461.0, memory_gib=(6.0, 7.0))
    plan = dataclasses.replace(PLAN, estimate=known)
    run = describe_run(read_record(write_record(path, start(), *INTERVALS)), plan, None)
    assert run.predicted == RunSpeed(1.5, 5461.0, None)
    assert [rank.predicted_gib for rank in run.ranks] == [6.0, 7.0]


def test_a_repeated_iteration_is_shown_as_it_was_last(path):
    again = interval(3, 4, seconds=1.0, losses=[7.0, None])
    write_record(path, start(), *INTERVALS, start(started="later"), interval(2), again)
    run = describe_run(read_record(path), PLAN, None)
    assert (run.iterations, run.starts) == ((1, 2, 3, 4), 2)
    assert run.losses == (10.0, 5.0, 7.0, None)
    assert run.seconds == (9.0, 2.0, 1.0, 1.0)
    assert run.timed == 3 + 2
    assert any("started 2 times" in note for note in run.notes)


@pytest.mark.parametrize("change", [{"digest": "0" * 64}, {"micro_batch_size": 2}])
def test_times_under_another_plan_or_other_settings_are_left_out(path, change):
    write_record(path, start(**change), interval(1), interval(2, seconds=50.0), start(), *INTERVALS)
    run = describe_run(read_record(path), PLAN, None)
    assert run.measured.iteration_s == pytest.approx(3.0)
    assert any("1 of these starts had another plan or other settings" in note for note in run.notes)


def test_swaps_are_no_starts_and_their_times_are_the_other_plans(path):
    away, back = start(digest="0" * 64, swapped_at=5), start(swapped_at=6)
    write_record(path, start(), *INTERVALS, away, interval(5, seconds=50.0), back, interval(6), interval(7))
    run = describe_run(read_record(path), PLAN, None)
    assert run.starts == 1
    assert run.iterations[-3:] == (5, 6, 7)
    assert run.measured.iteration_s < 10
    assert any("swapped 2 times while the job ran, before iteration 5, 6" in note for note in run.notes)
    assert not any("started" in note for note in run.notes)


def test_rounds_of_an_elastic_job_are_told(path):
    first = start(round=Round(1, (), 0, False, 0, 0.0))
    alone = start(digest="0" * 64, round=Round(2, ("slow-0",), 4, True, 1, 0.25))
    back = start(round=Round(3, (), 6, False, 0, 0.5))
    write_record(path, first, *INTERVALS, alone, interval(5), interval(6), back, interval(7), interval(8))
    run = describe_run(read_record(path), PLAN, None)
    assert run.starts == 3
    assert run.notes[:2] == (
        "round 2 without slow-0: from iteration 4 in memory, 1 iterations done again; goodput 25% by then",
        "round 3 with all nodes: from iteration 6, 0 iterations done again; goodput 50% by then",
    )
    assert run.timed > len(INTERVALS)  # the rounds by the plan itself count together


def test_a_record_of_another_plan_is_named(record):
    other = proportional_plan(JOB.workload(), [[[1.0], [1.0]]])
    with pytest.raises(
        HexiError, match=r"recorded under the plan [0-9a-f]{12}, not under [0-9a-f]{12}; give"
    ):
        describe_run(record, other, None)


def test_a_record_of_other_ranks_is_named(path):
    write_record(path, start(pipeline_parallel=2), interval(1))
    with pytest.raises(HexiError, match="the job had 2 ranks, but the plan makes it 4"):
        describe_run(read_record(path), PLAN, None)


def test_ranks_are_numbered_as_megatron_numbers_them(path):
    """Tensor parallelism inside, then members, then stages."""
    job = dataclasses.replace(JOB, tensor_parallel=2, pipeline_parallel=2)
    plan = proportional_plan(job.workload(), [[[3.0], [1.0]]])
    one = interval(1)
    waits = tuple(map(float, range(8)))
    eight = RankTimes((40.0,) * 8, waits, (0.0,) * 8, (0.0,) * 8, (GIB,) * 8)
    told = start(plan, pipeline_parallel=2, devices=("GPU",) * 8)
    write_record(path, told, dataclasses.replace(one, ranks=eight))
    machines = cluster([("a", "PLAIN", 8)])
    cost = estimate(plan, job, machines)
    run = describe_run(read_record(path), plan, cost)
    assert [rank.member for rank in run.ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank.stage for rank in run.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(rank.unit, rank.stage) for rank in cost.ranks] == [(r.member, r.stage) for r in run.ranks]
    assert [rank.attention_s for rank in run.ranks] == list(range(8))
    assert any("sums of tensor parallelism" in note for note in run.notes)


# The page.


def drawn(record, plan=PLAN, *, predicted=False, title="A run"):
    """The run, and the text of its page."""
    cost = estimate(plan, JOB, MACHINES) if predicted else None
    simulated = simulate(plan, JOB, MACHINES) if predicted else None
    replay = (draw_timeline(simulated, plan), simulated.iteration_s) if simulated else ()
    run = describe_run(record, plan, cost)
    return run, run_page(run, plan, title, cost, *replay)


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """The run of INTERVALS and its page, with predictions or without, drawn when first asked for."""
    path = tmp_path_factory.mktemp("run") / "record.jsonl"
    record = read_record(write_record(path, start(), *INTERVALS))
    return functools.cache(lambda *, predicted: drawn(record, predicted=predicted))


def test_every_number_of_the_tables_is_the_record_s(page_of):
    page = Page(page_of(predicted=False)[1])
    assert page.tables["plan"][1:] == [
        ["0", "group-0", "3,072", "75.0%", "0-3", "0-3", "0-1535, 2560-4095"],
        ["1", "group-1", "1,024", "25.0%", "0-3", "0-3", "1536-2559"],
    ]
    # By hand from INTERVALS: two iterations of 2 s and one of 5 s.
    assert page.tables["ranks"][2:] == [
        ["0", "GPU one", "2.35", "–", "0.4", "0.25", "0", "0.65", "–", "21.7%"],
        ["1", "GPU two", "2.25", "–", "0.5", "0.25", "0", "0.75", "–", "25.0%"],
    ]
    assert page.tables["memory"][1:] == [["0", "4.00", "–", "–"], ["1", "2.00", "–", "–"]]
    words = " ".join(page.words)
    for said in (
        "iterations 4",
        "an iteration 3 s",
        "speed 2,731 tokens/s",
        "idle share 23.3%",
        "last loss 2.5",
    ):
        assert said in re.sub(r"\s+", " ", words)


def test_predictions_stand_beside(page_of):
    run, text = page_of(predicted=True)
    page = Page(text)
    for row, rank in zip(page.tables["ranks"][2:], run.ranks, strict=True):
        assert float(row[3]) == pytest.approx(rank.predicted_busy_s, rel=5e-3)
        assert float(row[8]) == pytest.approx(rank.predicted_wait_s, rel=5e-3)
    for row, rank in zip(page.tables["memory"][1:], run.ranks, strict=True):
        assert [float(cell) for cell in row[2:]] == pytest.approx([rank.predicted_gib, 64], abs=5e-3)
    assert page.sections == ["plan", "ranks", "timeline", "memory", "course", "notes"]
    assert any(word.startswith("predicted") and "s" in word for word in page.words)


@pytest.mark.parametrize("predicted", [False, True])
def test_the_page_needs_nothing_else(page_of, predicted):
    _, text = page_of(predicted=predicted)
    page = Page(text)
    assert page.title == "A run"
    inside = {f"#{name}" for name in page.names}
    assert {name for name in page.references if name != "data:,"} <= inside
    assert len(page.names) == len(set(page.names))
    drawings = ["plan", "ranks", "memory", "course", *(["timeline"] if predicted else [])]
    assert len(page.labels) == len(drawings)
    assert all(len(label) > 30 for label in page.labels)
    assert "<script" not in text
    used = set(re.findall(r"url\(#([^)]+)\)", text))
    assert used
    assert used <= set(re.findall(r'\bid="([^"]+)"', text))
    assert not re.search(r"url\((?!#)|@import", text)


def test_names_cannot_become_html(path):
    replica = PLAN.replicas[0]
    group = dataclasses.replace(replica.domain.groups[0], name="<script>alert(1)</script>")
    domain = dataclasses.replace(replica.domain, groups=(group, *replica.domain.groups[1:]))
    stage = dataclasses.replace(replica.stages[0], domains=(domain,))
    plan = dataclasses.replace(PLAN, replicas=(dataclasses.replace(replica, stages=(stage,)),))
    told = start(plan, devices=("<b>GPU</b>", "&amp;"))
    record = read_record(write_record(path, told, *INTERVALS))
    _, text = drawn(record, plan, title="<i>run</i>")
    page = Page(text)
    assert page.title == "<i>run</i>"
    assert [row[1] for row in page.tables["ranks"][2:]] == ["<b>GPU</b>", "&amp;"]
    assert page.tables["plan"][1][1] == "<script>alert(1)</script>"
    assert not any(word in text for word in ("<script", "<b>", "<i>"))


def test_the_same_run_gives_the_same_page(page_of, record):
    assert drawn(record)[1] == page_of(predicted=False)[1]


def test_many_ranks_and_iterations_are_drawn(path):
    job = dataclasses.replace(JOB, seq_length=4096)
    plan = proportional_plan(job.workload(), [[[1.0]] * 70])
    one = interval(1)
    times = RankTimes((2.0,) * 70, (0.5,) * 70, (0.0,) * 70, (0.1,) * 70, (GIB,) * 70)
    many = dataclasses.replace(interval(*range(2, 302)), losses=(None,) * 300, ranks=times, tokens=8192)
    write_record(path, start(plan, devices=("GPU",) * 70), dataclasses.replace(one, ranks=times), many)
    page = Page(drawn(read_record(path), plan)[1])
    assert len(page.tables["ranks"]) == 2 + 70
    assert page.tables["ranks"][2][6] == "0.1"


# The command.


@pytest.fixture
def hexi(tmp_path, monkeypatch, capsys):
    """Calls ``hexi report`` in a folder with a plan, a record and a cluster file."""
    monkeypatch.chdir(tmp_path)
    write_plan(PLAN, "plan.yaml")
    write_record(tmp_path / "record.jsonl", start(), *INTERVALS)
    return lambda *words: call_hexi(monkeypatch, capsys, ["report", "plan.yaml", *words])


def test_the_command_writes_the_page_and_prints_its_figures(hexi, tmp_path):
    code, out, err = hexi("--record", "record.jsonl", "-o", "report.html", "--json")
    assert (code, err) == (0, "wrote report.html\n")
    document = json.loads(out)
    assert (document["plan"], document["record"]) == ("plan.yaml", "record.jsonl")
    run = describe_run(read_record(tmp_path / "record.jsonl"), PLAN, None)
    assert document["measured"] == dataclasses.asdict(run.measured)
    assert document["ranks"] == json.loads(json.dumps([dataclasses.asdict(rank) for rank in run.ranks]))
    page = Page((tmp_path / "report.html").read_text())
    assert page.title == "Run of plan.yaml"
    assert [row[0] for row in page.tables["ranks"][2:]] == [str(rank["rank"]) for rank in document["ranks"]]


def test_without_json_the_figures_are_printed_as_a_table(hexi):
    code, out, err = hexi("--record", "record.jsonl", "-o", "report.html")
    assert (code, err) == (0, "wrote report.html\n")
    assert "4 iterations, of which 3 are timed: 3 s each, 2,731 tokens/s, idle share 23.3%" in out
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "GPU " in line
    ]
    assert rows == [
        ["0", "GPU one", "2.35", "0.65", "21.7%", "4.00"],
        ["1", "GPU two", "2.25", "0.75", "25.0%", "2.00"],
    ]
    assert "note: means are of 3 iterations" in out


CLUSTER = """\
name: pair
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 1}
- {name: a100, gpu: A100-SXM-80GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""


def test_with_a_cluster_and_a_model_it_predicts(hexi, tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "model.args").write_text(
        "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --kv-channels 128 --ffn-hidden-size 2048 "
        "--vocab-size 1024 --position-embedding-type rope\n"
    )
    words = ("--record", "record.jsonl", "--cluster", "cluster.yaml", "-o", "report.html")
    code, out, err = hexi(*words, "--model", "model.args", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["predicted"]["iteration_s"] > 0
    assert document["ranks"][1]["device"] == "A100-SXM-80GB (a100-0/0)"
    _, out, _ = hexi(*words, "--model", "model.args")
    assert f"(predicted {document['predicted']['tokens_per_s']:,.0f})" in out
    page = Page((tmp_path / "report.html").read_text())
    assert page.title == "Run of model.args on pair"
    assert "timeline" in page.sections
    code, out, err = hexi(*words)
    assert (code, is_one_error_line(err)) == (2, True)
    assert "plan.yaml: does not say which model it is for" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--record", "gone.jsonl", "-o", "report.html"), "gone.jsonl: cannot be read"),
        (("--record", "plan.yaml", "-o", "report.html"), "plan.yaml:1: 'version: 2' is not a line of a run"),
        (("--record", "record.jsonl"), "Missing option '--out'"),
        (("-o", "report.html"), "Missing option '--record'"),
        (("--record", "record.jsonl", "-o", "record.jsonl"), "record.jsonl: this command reads or writes"),
        (("--record", "record.jsonl", "-o", "gone/report.html"), "the folder gone is not there"),
        (
            ("--record", "record.jsonl", "-o", "r.html", "--model", "gpt-7b"),
            "--model gpt-7b without --cluster",
        ),
        (("--record", "record.jsonl", "-o", "r.html", "--cluster", "gone.yaml"), "gone.yaml: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_written(hexi, tmp_path, words, said):
    code, out, err = hexi(*words)
    assert (code, out, is_one_error_line(err)) == (2, "", True), err
    assert said in err
    assert not list(tmp_path.glob("*.html"))
