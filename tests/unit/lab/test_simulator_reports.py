"""What people see of a simulation: a trace for Perfetto, tables, a picture."""

import dataclasses
import itertools
import json
from collections import defaultdict

import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from megatron_hexi.cost import estimate
from megatron_hexi.lab.simulator import PhaseComparison, chrome_trace, compare_with_model, simulate
from megatron_hexi.lab.simulator.timeline import timeline_dict, timeline_report
from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
from megatron_hexi.plan import proportional_plan
from megatron_hexi.report.pictures import plan_title, save_picture
from megatron_hexi.text_file import write_text_atomically
from tests.support.costs import TINY, cluster, tiny_job


def simulated(groups=((2.0, 1.0), (1.0, 1.0)), **changes):
    job = tiny_job(**changes)
    plan = proportional_plan(job.workload(), [[list(group) for group in groups]])
    units = plan.units * job.tensor_parallel * job.pipeline_parallel
    known = cluster(
        [("a", "PLAIN", units // 2), ("b", "DOUBLE", units - units // 2)], bandwidth=4, per="node"
    )
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    return found, cost, compare_with_model(found, cost)


def printed(report, width=200):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "full"}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}]
)
def test_traces_are_valid(tmp_path, changes):
    found, _, _ = simulated(**changes)
    path = tmp_path / "trace.json"
    write_text_atomically(path, json.dumps(chrome_trace(found)))
    trace = json.loads(path.read_text())
    lanes, names = defaultdict(list), {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]
            continue
        assert event["ph"] == "X"
        assert event["dur"] > 0
        assert event["args"]["way"] in ("forward", "logits", "again", "backward")
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        for before, after in itertools.pairwise(sorted(spans)):
            assert before[1] <= after[0] * (1 + 1e-9)
    # Every lane has a name, and the first rank of every unit both lanes. A pipeline's stages have one each.
    units = {(rank.stage, rank.unit) for rank in found.ranks}
    stages = {rank.stage for rank in found.ranks}
    assert len({pid for pid, _ in lanes if pid < len(found.ranks)}) == len(units)
    assert {lane for lane in lanes if lane[0] >= len(found.ranks)} == {
        (len(found.ranks), stage) for stage in stages if len(stages) > 1
    }
    assert {(("thread_name"), pid, tid) for pid, tid in lanes} <= set(names)
    assert names["process_name", 0, 0] == {"name": "rank 0: a-0/0 (PLAIN)"}
    assert names["thread_name", 0, 1] == {"name": "network"}
    pipeline = sum(map(len, found.pipeline)) if len(stages) > 1 else 0
    assert sum(map(len, lanes.values())) == len(found.spans) + pipeline
    assert trace["otherData"]["iteration_s"] == found.iteration_s


def test_tables_say_it_all():
    found, cost, differences = simulated()
    text = printed(timeline_report(found, cost, differences))
    assert f"{found.iteration_s / cost.iteration_s - 1:+.1%} against the cost model" in text
    assert "replayed: one micro-batch through all 2 layers of each stage, and back" in text
    assert found.links[0].name in text
    for rank in found.ranks:
        assert rank.name in text
        assert f"{rank.idle_share:.1%}" in text
    for row in differences:
        assert row.phase.replace("_", " ") in text


def test_alike_ranks_share_a_line():
    found, cost, differences = simulated(groups=((1.0, 1.0, 1.0, 1.0),))
    assert "a-0/0-1" in printed(timeline_report(found, cost, differences))


def test_less_than_nothing_is_spelt():
    found, cost, _ = simulated()
    rows = (
        PhaseComparison("exchange", 1e-12, -0.25),
        PhaseComparison("iteration", 2.0, 1.75),
    )
    lines = printed(timeline_report(found, cost, rows)).splitlines()
    (exchange,) = (line for line in lines if "exchange " in line and "│" in line and "mostly" not in line)
    assert [cell.strip() for cell in exchange.split("│")[1:5]] == ["exchange", "0", "-0.25", "-12.5%"]


def test_a_part_of_the_layers_is_named(monkeypatch):
    monkeypatch.setattr("megatron_hexi.lab.simulator.replay.MOST_MESSAGES", 0)
    found, cost, differences = simulated(model=dataclasses.replace(TINY, layers=8))
    assert "through 3 of the 8 layers of each stage" in printed(timeline_report(found, cost, differences))


def test_everything_is_plain_data():
    found, cost, differences = simulated(recompute="selective")
    document = json.loads(json.dumps(timeline_dict(found, cost, differences)))
    assert document["iteration_s"] == found.iteration_s
    assert document["model_iteration_s"] == cost.iteration_s
    assert sum(document["phases_s"].values()) == pytest.approx(found.iteration_s)
    assert [rank["idle_s"] for rank in document["ranks"]] == [rank.idle_s for rank in found.ranks]
    assert document["differences"][-1]["difference_s"] == found.iteration_s - cost.iteration_s
    assert [link["name"] for link in document["links"]] == [link.name for link in found.links]


def bars(axes):
    """Colour, left and right end, and bottom of every bar."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            corners = path.get_extents()
            found.append((to_hex(collection.get_facecolor()[0]), corners.x0, corners.x1, corners.y0))
    return found


def test_the_picture_shows_a_layer_in_both_directions(tmp_path):
    found, _, _ = simulated(recompute="selective")
    figure = draw_timeline(found)
    forward, backward = figure.axes
    assert forward.get_title(loc="left") == "layer 2, forward"
    assert backward.get_title(loc="left") == "layer 1, backward (what is recomputed first)"
    assert [label.get_text() for label in forward.get_yticklabels()] == [
        "0: a-0/0",
        "1: a-0/1",
        "2: b-0/0",
        "3: b-0/1",
    ]
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"token work", "own block", "other groups' blocks", "all-to-all", "keys", "gradients"} <= legend
    # Token work of rank 0 in the last layer forward: where the spans say, in ms, from the layer's own start.
    spans = [span for span in found.spans if (span.way, span.layer) == ("forward", 1)]
    start = min(span.start_s for span in spans)
    token = next(span for span in spans if (span.rank, span.kind) == (0, "token"))
    wanted = ((token.start_s - start) * 1e3, (token.end_s - start) * 1e3)
    assert any(
        bar[1:3] == pytest.approx(wanted) and bar[0] == "#4878a8" and bar[3] == pytest.approx(-0.42)
        for bar in bars(forward)
    )
    assert forward.get_xlim()[1] == pytest.approx((max(span.end_s for span in spans) - start) * 1e3)
    save_picture(figure, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_the_picture_has_a_title_and_a_heading_for_each_stage_of_unequal_replicas():
    job = tiny_job(pipeline_parallel=2, data_parallel=2, global_batch_size=2)
    plan = proportional_plan(job.workload(), [[[2.0, 1.0]], [[1.0]]])
    known = cluster([("a", "PLAIN", 6)])
    figure = draw_timeline(simulate(plan, job, known), plan)
    assert figure.get_suptitle() == plan_title(plan)
    pipeline, forward, _ = figure.axes
    labels = [label.get_text() for label in pipeline.get_yticklabels()]
    assert labels == [f"replica {replica}, stage {stage}: PLAIN" for replica in (0, 1) for stage in (0, 1)]
    assert [text.get_text().partition(":")[0] for text in forward.texts] == [
        f"replica {replica}, stage {stage}" for replica in (0, 1) for stage in (0, 1)
    ]
    # Each heading is above its first row and below the row before.
    tops, places = [text.get_position()[1] for text in forward.texts], list(forward.get_yticks())
    assert sorted([*places, *tops]) == [
        *(tops[0], places[0], places[1], tops[1], places[2], places[3]),
        *(tops[2], places[4], tops[3], places[5]),
    ]


def test_many_ranks_that_are_alike_share_a_row():
    few, _, _ = simulated(groups=((1.0,) * 4,) * 8)
    assert len(draw_timeline(few).axes[0].get_yticklabels()) == 32
    # 48 ranks in twelve groups of four, six of them a node.
    many, _, _ = simulated(groups=((1.0,) * 4,) * 12)
    labels = [label.get_text() for label in draw_timeline(many).axes[0].get_yticklabels()]
    assert len(labels) == 12
    assert labels[0] == "0-3: a-0/0-3"


@pytest.mark.parametrize(
    "changes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"groups": ((1.0,),) * 2}]
)
def test_any_simulation_can_be_drawn(tmp_path, changes):
    found, _, _ = simulated(**changes)
    figure = draw_timeline(found)
    units = {(rank.stage, rank.unit) for rank in found.ranks}
    assert len(figure.axes[-2].get_yticklabels()) == len(units)
    save_picture(figure, tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert "</svg>" in text
