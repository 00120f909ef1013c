"""Pictures of plans of any size can be read: no label takes the axes' room, and none lies over another."""

import dataclasses
import itertools
from typing import Any

import pytest
from matplotlib.colors import to_hex

from megatron_hexi.lab.simulator import simulate
from megatron_hexi.lab.simulator.pipeline_picture import pipeline_rows
from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
from megatron_hexi.plan import (
    Domain,
    Plan,
    Provenance,
    Replica,
    Stage,
    Workload,
    proportional_plan,
    validate_plan,
)
from megatron_hexi.report.comparison import compare
from megatron_hexi.report.comparison_picture import draw_comparison
from megatron_hexi.report.labels import wrap
from megatron_hexi.report.pictures import draw_plan
from megatron_hexi.report.unit_summary import unit_summaries
from megatron_hexi.spelling import spell_time, time_unit
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.planned import baseline, make_planned
from tests.support.readable import assert_readable, drawn_texts

#: As operators call nodes; the longest that a cluster file may have are longer still.
LONG = "rack17-row3-h100-sxm-80gb-infiniband-node"
EVERYTHING = ("parameters", "optimizer", "activations")


def staged(ranks, stages, *, replicas=1, ministages=None, offload=EVERYTHING, name="node", width=1):
    """A plan of so many ranks: equal stages, each of groups of up to four units, named after a node each."""
    count = ministages or 1
    layers, offload = 2 * count, offload if ministages else None
    workload = Workload(4096, 16, 4, 64, layers=layers * stages, tensor_parallel=width)
    units = ranks // replicas // stages // width
    cut = (
        proportional_plan(
            Workload(4096, 16 // width, 4, 64),
            [[[1.0] * len(part) for part in itertools.batched(range(units), 4)]],
        )
        .replicas[0]
        .domain
    )
    following = itertools.count(0, width)
    found = []
    for replica in range(replicas):
        own = []
        for stage in range(stages):
            groups = tuple(
                dataclasses.replace(
                    group,
                    name=f"{name}-{replica}-{stage}-{number}",
                    members=tuple(
                        dataclasses.replace(member, ranks=tuple(range(first, first + width)))
                        for member, first in zip(group.members, following, strict=False)
                    ),
                )
                for number, group in enumerate(cut.groups)
            )
            own.append(
                Stage(
                    (Domain(groups),),
                    layers=(stage * layers, (stage + 1) * layers),
                    ministages=ministages,
                    offload=offload,
                )
            )
        found.append(Replica(tuple(own), 4))
    plan = Plan(workload, tuple(found), provenance=Provenance(cluster=f"{name} cluster", model="some-70b"))
    validate_plan(plan)
    return plan


@pytest.mark.parametrize(
    ("ranks", "stages", "changes"),
    [
        (4, 1, {}),
        (4, 4, {}),
        pytest.param(16, 1, {"ministages": 8}, marks=pytest.mark.slow),
        (16, 4, {"ministages": 4}),
        pytest.param(16, 16, {}, marks=pytest.mark.slow),
        pytest.param(48, 1, {"ministages": 8, "width": 2}, marks=pytest.mark.slow),
        pytest.param(128, 1, {}, marks=pytest.mark.slow),
        pytest.param(128, 4, {"replicas": 4}, marks=pytest.mark.slow),
        (128, 16, {"width": 4}),
        pytest.param(128, 16, {"ministages": 8}, marks=pytest.mark.slow),
    ],
)
def test_any_plan_can_be_read(ranks, stages, changes):
    plan = staged(ranks, stages, name=LONG * 3, **changes)
    gpus = [f"{LONG.upper()}-{rank * 6 // ranks}" for rank in range(ranks)]
    assert_readable(draw_plan(plan, unit_summaries(plan), gpus if stages > 1 else ()))


def test_a_bar_has_the_longest_text_that_fits():
    """One of sixteen stages has room for its name, one of two for its layers too."""
    for stages, text in ((16, "stage 3"), (2, "stage 0: 2 layers")):
        plan = staged(16, stages)
        figure = draw_plan(plan, unit_summaries(plan))
        assert_readable(figure)
        assert text in {drawn.get_text() for drawn in drawn_texts(figure)}


def test_more_rows_than_fit_are_labelled_in_part(monkeypatch):
    monkeypatch.setattr("megatron_hexi.report.pictures._MAX_HEIGHT", 6.0)
    plan = staged(64, 32)
    figure = draw_plan(plan, unit_summaries(plan))
    assert figure.get_figheight() == 6
    assert_readable(figure)
    assert 1 < len(figure.axes[1].get_yticklabels()) < 32


def test_what_divides_nothing_has_no_row_where_others_do():
    plan = staged(8, 4, width=2)  # one unit a stage
    (layers,) = draw_plan(plan, unit_summaries(plan)).axes
    assert layers.get_title(loc="left").startswith("Layers")
    two_groups = proportional_plan(Workload(4096, 16, 4, 64), [[[1, 1], [1]]])
    tokens, heads = draw_plan(two_groups, unit_summaries(two_groups)).axes
    assert len(heads.get_yticklabels()) == 1  # the group of two
    ring = proportional_plan(Workload(4096, 16, 4, 64), [[[1], [1]]])
    (tokens,) = draw_plan(ring, unit_summaries(ring)).axes
    assert tokens.get_xlim() == (0, 4096)


def simulated(ranks, stages, *, name="node", **changes):
    plan = staged(ranks, stages, name=name, **changes)
    layers = plan.workload.layers
    model = dataclasses.replace(TINY, layers=layers, heads=16, kv_heads=4, head_dim=64)
    job = tiny_job(
        model=model,
        global_batch_size=sum(replica.micro_batches for replica in plan.replicas),
        data_parallel=len(plan.replicas),
    )
    nodes = [(f"{name}{n}", ("PLAIN", "DOUBLE")[n % 2], ranks // 4) for n in range(4)]
    return simulate(plan, job, cluster(nodes, bandwidth=4, per="node")), plan


@pytest.mark.parametrize(
    ("ranks", "stages", "changes"),
    [
        (4, 1, {}),
        (4, 4, {}),
        pytest.param(16, 4, {"name": LONG}, marks=pytest.mark.slow),
        pytest.param(16, 16, {}, marks=pytest.mark.slow),
        (16, 2, {"replicas": 2, "name": LONG}),
        (16, 4, {"ministages": 4, "offload": None, "name": LONG}),
        pytest.param(128, 16, {"name": LONG}, marks=pytest.mark.slow),
    ],
)
def test_any_simulation_can_be_read(ranks, stages, changes):
    found, plan = simulated(ranks, stages, **changes)
    figure = draw_timeline(found, plan)
    assert_readable(figure)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0].startswith("Pipeline") == (stages > 1)


def test_the_pipeline_shows_every_pass_when_it_happens_and_how_long_a_stage_is_idle():
    found, plan = simulated(16, 4)
    (passes,) = found.pipeline
    axes: Any = draw_timeline(found, plan).axes[0]
    unit = time_unit(found.iteration_s)
    drawn: dict[str, list[tuple[float, ...]]] = {}
    for bars in axes.collections:
        colour = to_hex(bars.get_facecolor()[0])
        for path in bars.get_paths():
            box = path.get_extents()
            drawn.setdefault(colour, []).append((round((box.y0 + box.y1) / 2), box.x0, box.x1))
    for way, colour in (("forward", "#4878a8"), ("backward", "#e08214")):
        wanted = [
            (span.stage, span.start_s / unit.seconds, span.end_s / unit.seconds)
            for span in passes
            if span.way == way
        ]
        assert [value for bar in sorted(drawn[colour]) for value in bar] == pytest.approx(
            [value for bar in sorted(wanted) for value in bar]
        )
    assert len(passes) == 2 * 4 * 4  # four micro-batches through four stages, and back
    for stage, text in zip(range(4), [text for text in axes.texts if "idle" in text.get_text()], strict=True):
        busy = sum(span.end_s - span.start_s for span in passes if span.stage == stage)
        last = max(span.end_s for span in passes if span.stage == stage)
        end = min(found.once[0, stage].total, found.iteration_s - last)
        assert text.get_text() == f"{1 - (busy + end) / found.iteration_s:.0%} idle"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"stage {stage}, 2 layers: {('PLAIN', 'DOUBLE')[stage % 2]}" for stage in range(4)]


def test_replicas_that_run_alike_share_their_rows():
    """Replicas 0 and 2 are on nodes of one kind, 1 and 3 on nodes of the other."""
    found, _ = simulated(8, 1, replicas=4)
    assert [row.replicas for row in pipeline_rows(found)] == [(0, 2), (1, 3)]


def test_a_comparison_with_long_names_can_be_read():
    nodes = cluster([("fast", "DOUBLE", 2), ("slow", "PLAIN", 2)])
    baselines = [
        baseline("usp", 60.0),
        baseline(f"{LONG} {LONG}", 1000.0),
        baseline("ring", 40.0),
        baseline("ulysses", why_not=f"{LONG} " * 9),
    ]
    planned = make_planned(tiny_job(), nodes, [[[2, 2], [1, 1]]], baselines=baselines)
    figure = draw_comparison(compare(planned, nodes), f"tiny, on {LONG} {LONG} {LONG} {LONG} {LONG}")
    assert_readable(figure)
    words = " ".join(text.get_text() for text in drawn_texts(figure))
    assert "e+0" not in words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00035, "350 µs"),
        (0.0125, "12.5 ms"),
        (0.9996, "1,000 ms"),
        (1, "1 s"),
        (59.94, "59.9 s"),
        (405, "405 s"),
        (1040, "17.3 min"),
        (7200, "2 h"),
        (86400, "24 h"),
        (3e5, "3.47 days"),
    ],
)
def test_times_read_as_people_write_them(seconds, text):
    assert spell_time(seconds) == text


def test_one_unit_for_all_bars():
    assert spell_time(30, time_unit(1040)) == "0.5 min"


def test_long_names_are_shortened_and_said_to_be():
    assert wrap("a" * 60 + "b" * 60, 34, 1) == "a" * 16 + "…" + "b" * 16
    assert wrap("replica 0, stage 1", 34) == wrap("replica 0, stage 1", 34, 1) == "replica 0, stage 1"
    lines = wrap("word " * 100).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 34 for line in lines)
    assert lines[-1].endswith("…")
