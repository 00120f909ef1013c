"""Reports of a fresh plan: who gets what by kind of GPU, how far from the best, the baselines beside it."""

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from rich.console import Console

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import ceiling_tokens_per_s, estimate
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, proportional_plan
from megatron_hexi.report.comparison import alone_text, compare, comparison_dict, comparison_report
from megatron_hexi.report.comparison_picture import draw_comparison
from megatron_hexi.report.planned import fabric_lines, host_lines, planned_dict, planned_report
from megatron_hexi.report.share_lines import find_shares, spell_layout, spell_nodes, spell_recomputed
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.planned import baseline, make_planned

FOUR = cluster([("fast", "DOUBLE", 2), ("slow", "PLAIN", 2)])
#: 2731 of 4096 tokens on the fast node.
SPEEDS = [[[2, 2], [1, 1]]]


def text_of(report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=220).print(report)
    return stream.getvalue()


@pytest.fixture
def planned():
    return make_planned(tiny_job(), FOUR, SPEEDS)


def test_a_share_is_what_the_plan_says(planned):
    fast, slow = find_shares(planned.plan, planned.job, planned.cost, FOUR)
    members = planned.plan.replicas[0].domain.members
    assert (fast.device, fast.nodes, fast.groups, fast.members) == ("DOUBLE", ("fast-0",), 1, 2)
    assert (slow.device, slow.nodes, slow.groups, slow.members) == ("PLAIN", ("slow-0",), 1, 2)
    assert fast.tokens == (members[1].tokens, members[0].tokens) == (1365, 1366)
    assert fast.share + slow.share == pytest.approx(1)
    assert fast.share == pytest.approx(2731 / 4096)
    assert fast.heads == slow.heads == (2, 2)
    assert fast.memory_gib == max(planned.cost.memory_gib[:2])
    assert slow.memory_gib == max(planned.cost.memory_gib[2:])
    assert (fast.usable_gib, fast.replicas, fast.micro_batches) == (64, (0,), 1)


def test_groups_that_are_alike_share_a_line():
    nodes = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2), ("c", "DOUBLE", 2)])
    planned = make_planned(tiny_job(), nodes, [[[1, 1], [1, 1], [2, 2]]])
    shares = find_shares(planned.plan, planned.job, planned.cost, nodes)
    assert [(one.groups, one.members, one.nodes) for one in shares] == [
        (2, 2, ("a-0", "b-0")),
        (1, 2, ("c-0",)),
    ]
    assert shares[0].share == pytest.approx(0.5)


def test_a_group_of_two_kinds_has_a_line_each():
    planned = make_planned(tiny_job(), FOUR, [[[3, 3, 1, 1]]])
    fast, slow = find_shares(planned.plan, planned.job, planned.cost, FOUR)
    assert (fast.groups, fast.members, fast.share) == (1, 2, 0.75)
    assert (slow.groups, slow.members, slow.share) == (1, 2, 0.25)
    # 4 heads by 3, 3, 1, 1 are 1.5, 1.5, 0.5, 0.5.
    heads = [member.heads[1] - member.heads[0] for member in planned.plan.replicas[0].domain.members]
    assert fast.heads == (min(heads[:2]), max(heads[:2]))
    assert slow.heads == (min(heads[2:]), max(heads[2:]))


def test_a_throttled_gpu_is_another_kind():
    nodes = cluster([("a", "PLAIN", 2), ("b", "PLAIN, speed: 0.5", 2)])
    planned = make_planned(tiny_job(), nodes, [[[2, 2, 1, 1]]])
    shares = find_shares(planned.plan, planned.job, planned.cost, nodes)
    assert [one.nodes for one in shares] == [("a-0",), ("b-0",)]


def test_replicas_that_are_alike_share_a_line():
    nodes = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2), ("c", "DOUBLE", 2)])
    planned = make_planned(tiny_job(global_batch_size=3), nodes, [[[1, 1]], [[1, 1]], [[1], [1]]])
    shares = find_shares(planned.plan, planned.job, planned.cost, nodes)
    assert [(one.replicas, one.groups, one.members, one.share) for one in shares] == [
        ((0, 1), 1, 2, 1.0),
        ((2,), 2, 1, 1.0),
    ]
    assert spell_layout(shares) == (
        "replicas 0-1, 1 micro-batch each: 2 x PLAIN (100% of tokens, 2 heads each); "
        "replica 2, 1 micro-batch: 2 groups of 1 x DOUBLE (100% of tokens, 4 heads each)"
    )
    text = text_of(planned_report(planned, nodes))
    assert "micro-batches each" in text


def test_replicas_with_other_shares_of_the_batch_are_not_alike():
    nodes = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)])
    job = tiny_job(global_batch_size=3, data_parallel=2)
    whole = Domain((Group(((0, 4096),), (Member((0,), 4096, (0, 4)),)),))
    other = Domain((Group(((0, 4096),), (Member((1,), 4096, (0, 4)),)),))
    plan = Plan(job.workload(), (Replica((Stage((whole,)),), 2), Replica((Stage((other,)),), 1)))
    shares = find_shares(plan, job, estimate(plan, job, nodes), nodes)
    assert [(one.replicas, one.micro_batches) for one in shares] == [((0,), 2), ((1,), 1)]


def test_a_member_of_several_gpus_counts_once():
    nodes = cluster([("a", "DOUBLE", 4), ("b", "PLAIN", 4)])
    planned = make_planned(tiny_job(tensor_parallel=2), nodes, [[[2, 2], [1, 1]]])
    shares = find_shares(planned.plan, planned.job, planned.cost, nodes)
    assert [(one.members, one.device, one.heads) for one in shares] == [
        (2, "DOUBLE", (1, 1)),
        (2, "PLAIN", (1, 1)),
    ]
    assert "a member is 2 GPUs" in text_of(planned_report(planned, nodes))


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (["h-0"], "h-0"),
        (["h-0", "h-1", "h-2", "h-4"], "h-0..2, h-4"),
        (["h-1", "h-0"], "h-1, h-0"),
        (["a-b-0", "a-b-1", "c-1"], "a-b-0..1, c-1"),
        ([f"n{i}-0" for i in range(6)], "n0-0, n1-0, n2-0, n3-0 and 2 more"),
    ],
)
def test_spell_nodes(nodes, text):
    assert spell_nodes(nodes) == text


def test_the_report_says_how_fast_and_how_far_from_the_best(planned):
    text = text_of(planned_report(planned, FOUR))
    cost = planned.cost
    ceiling = ceiling_tokens_per_s(planned.job, [rank.device for rank in FOUR.ranks])
    assert "tiny, 4,096 tokens, global batch 1, on test: 2 x DOUBLE, 2 x PLAIN" in text
    assert f"{cost.tokens_per_s:,.0f} tokens/s" in text
    assert f"{cost.tokens_per_s / ceiling:.1%} of the ceiling of {ceiling:,.0f} tokens/s" in text
    assert "(every GPU computes at its best rate); this one takes at most 25.0% longer" in text
    assert any(
        "66.7%" in line and "1,365-1,366" in line and "2 x DOUBLE" in line for line in text.splitlines()
    )
    assert "planned in 0.5 s, 7 layouts timed" in text
    assert "must be started" not in text


def test_a_plan_at_its_bound_is_called_the_best():
    text = text_of(planned_report(make_planned(tiny_job(), FOUR, SPEEDS, gap=0.0001), FOUR))
    assert "this one takes no longer: it is the best" in text


def test_notes_and_chosen_gpus_are_told():
    planned = make_planned(tiny_job(), FOUR, [[[1, 1]]], notes=["two GPUs stay idle"], gpus=(0, 1))
    text = text_of(planned_report(planned, FOUR))
    assert "note: two GPUs stay idle" in text
    assert "ranks must be started on the GPUs that the plan names" in text
    # The ceiling is that of the whole cluster, idle GPUs included.
    document = planned_dict(planned, FOUR)
    assert document["ceiling_tokens_per_s"] == pytest.approx(
        ceiling_tokens_per_s(planned.job, [rank.device for rank in FOUR.ranks])
    )
    assert document["gpus"] == [0, 1]


NAMES = {
    "planning_s",
    "tokens_per_s",
    "iteration_s",
    "lower_bound_s",
    "gap",
    "ceiling_tokens_per_s",
    "memory_gib",
    "notes",
    "phases_s",
    "bound_reason",
    "trials",
    "data_parallel",
}


def test_the_document_is_complete(planned):
    document = planned_dict(planned, FOUR)
    assert document.keys() >= NAMES
    assert document["gap"] == pytest.approx(document["iteration_s"] / document["lower_bound_s"] - 1)
    assert document["tokens_per_s"] == pytest.approx(4096 / document["iteration_s"])
    assert sum(document["phases_s"].values()) == pytest.approx(document["iteration_s"])
    assert len(document["memory_gib"]) == document["ranks"] == 4


@pytest.fixture
def raced():
    """A plan and baselines at given parts of its speed, in no order."""
    alone = make_planned(tiny_job(), FOUR, SPEEDS).cost.tokens_per_s
    return make_planned(
        tiny_job(),
        FOUR,
        SPEEDS,
        baselines=[
            baseline("ring", 0.5 * alone),
            baseline("ulysses", why_not="[red]3 ranks do not divide 4 heads", layout=""),
            baseline("usp", 0.8 * alone, layout="2 groups of 2"),
            baseline("te-a2a+p2p", why_not="needs 99.0 GiB", layout="one group of 4"),
            baseline("proportion", 0.9 * alone, uniform=False),
            baseline("homogeneous", alone, uniform=False, layout="2 DOUBLE alone: one group of 2"),
        ],
    )


def test_results_are_sorted_and_compared_to_the_fastest_uniform_one(raced):
    comparison = compare(raced, FOUR)
    assert [one.name for one in comparison.results] == [
        *("hexi", "homogeneous", "proportion", "usp", "ring"),
        *("ulysses", "te-a2a+p2p"),
    ]
    speed_ups = [comparison.speed_up(one) for one in comparison.results]
    assert speed_ups[:5] == pytest.approx([1.25, 1.25, 1.125, 1, 0.625])
    assert speed_ups[5:] == [None, None]


def test_the_table_has_every_result_and_every_reason(raced):
    text = text_of(comparison_report(raced, FOUR))
    (line,) = (line for line in text.splitlines() if " usp " in line and "│" in line)
    assert "1.00x" in line
    assert "2 groups of 2" in line
    assert f"{0.8 * raced.cost.tokens_per_s:,.0f}" in line
    assert "[red]3 ranks do not divide 4 heads" in text
    assert "one group of 4: needs 99.0 GiB" in text
    assert text.splitlines()[-1] == (
        "beside what one would run today, the plan is 1.00 times as fast as 2 DOUBLE alone and 1.25 times "
        "as fast as Megatron's best flags on all GPUs (usp)"
    )


def test_uneven_layers_are_megatrons_flags_and_tokens_by_speed_are_not(raced):
    faster = baseline("uneven-layers", 0.95 * raced.cost.tokens_per_s, uniform=False)
    faster.trial.plan, faster.trial.job = raced.plan, raced.job
    planned = dataclasses.replace(raced, baselines=(*raced.baselines, faster))
    over = comparison_dict(planned, FOUR)["gain"]
    assert over["over_flags"]["name"] == "uneven-layers"
    assert over["over_flags"]["times"] == pytest.approx(1 / 0.95)
    assert over["over_one_kind"]["name"] == "homogeneous"
    assert over["over_one_kind"]["layout"] == "2 DOUBLE alone: one group of 2"


def test_gpus_of_one_kind_are_not_compared_with_themselves(raced):
    comparison = dataclasses.replace(compare(raced, FOUR), is_mixed=False)
    assert comparison.one_kind is None
    assert alone_text(comparison) == ""


def test_the_document_of_a_comparison(raced):
    document = comparison_dict(raced, FOUR)
    results = {one["name"]: one for one in document["results"]}
    assert (document["cluster"], document["model"], document["seq_length"]) == ("test", "tiny", 4096)
    assert results["ulysses"]["tokens_per_s"] is None
    assert results["ulysses"]["why_not"] == "[red]3 ranks do not divide 4 heads"
    assert results["usp"]["why_not"] is None
    assert results["usp"]["layout"] == "2 groups of 2"
    ours = results["hexi"]
    assert ours["tokens_per_s"] == document["plan"]["tokens_per_s"]
    for name in ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu"):
        assert ours[name] == document["plan"][name]
        assert results["usp"][name] / ours[name] == pytest.approx(
            results["usp"]["tokens_per_s"] / ours["tokens_per_s"]
        )
    assert ours["recompute"] == results["usp"]["recompute"] == "none"
    assert results["ulysses"]["recompute"] is None
    assert ours["share_of_ceiling"] == pytest.approx(ours["tokens_per_s"] / document["ceiling_tokens_per_s"])
    assert ours["speed_up"] == pytest.approx(1.25)
    assert (
        "2 x DOUBLE (67% of tokens, 2 heads each) + 2 x PLAIN (33% of tokens, 2 heads each)" in ours["layout"]
    )


@pytest.mark.parametrize(
    ("recompute", "stages", "said"),
    [
        ("none", 2, "none"),
        ("full", 1, "full"),
        ("selective", 2, "selective"),
        (1, 2, "full: 2 of 4 layers"),
        (3, 1, "full: 3 of 4 layers"),
        (2, 2, "full"),
    ],
)
def test_what_is_recomputed_is_counted_over_all_stages(recompute, stages, said):
    model = dataclasses.replace(TINY, layers=4)
    job = tiny_job(model=model, recompute=recompute, pipeline_parallel=stages)
    assert spell_recomputed(proportional_plan(job.workload(), [[[1.0]]]), job) == said


def test_without_a_uniform_layout_nothing_is_compared_to_it():
    planned = make_planned(tiny_job(), FOUR, SPEEDS, baselines=[baseline("ring", why_not="no room")])
    comparison = compare(planned, FOUR)
    assert comparison.best_uniform is None
    assert comparison.speed_up(comparison.ours) is None
    assert comparison_dict(planned, FOUR)["gain"] == {"over_one_kind": None, "over_flags": None}
    assert text_of(comparison_report(planned, FOUR)).splitlines()[-1] == (
        "beside what one would run today, the plan is able to do what no kind of GPU can do alone and able "
        "to do what no layout of Megatron's flags on all GPUs can"
    )
    draw_comparison(comparison, "title").savefig(io.BytesIO())


def bars(axes):
    """The bars in it."""
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_the_picture_has_a_bar_a_result_and_all_phases(raced):
    comparison = compare(raced, FOUR)
    figure = draw_comparison(comparison, "what is compared")
    figure.savefig(io.BytesIO())
    speeds, times = figure.axes
    widths = [bar.get_width() for bar in bars(speeds)]
    assert widths == pytest.approx([one.tokens_per_s for one in comparison.results if one.tokens_per_s])
    assert len({to_hex(bar.get_facecolor()) for bar in bars(speeds)}) == 2  # ours stands out
    stacked: dict[int, float] = {}
    for bar in bars(times):
        row = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(stacked.get(row, 0))  # one begins where the one before ends
        stacked[row] = bar.get_x() + bar.get_width()
    done = [one for one in comparison.results if one.phases]
    assert stacked == pytest.approx({row: one.iteration_s for row, one in enumerate(done)})
    words = " ".join(text.get_text().replace("\n", " ") for text in speeds.texts)
    assert "3 ranks do not divide 4 heads" in words
    assert f"{raced.cost.tokens_per_s:,.0f}" in words
    lines = [float(line.get_path().get_extents().xmin) for line in speeds.lines]
    assert lines == pytest.approx([comparison.ceiling_tokens_per_s, raced.cost.tokens_per_s * 1.25])


def test_host_memory_that_nobody_measured_is_said_to_be_assumed_with_its_size():
    """H100s have 200 GiB each by the catalogue; a device that offloads nothing has no line."""
    nodes = (("fast", "H100-SXM-80GB", 1), ("slow", "A100-SXM-80GB", 1))
    known = cluster(nodes)

    def rank(device, size):
        return SimpleNamespace(device=device, host_memory=SimpleNamespace(total=size * 2**30))

    ranks = [rank("H100-SXM-80GB", 40), rank("H100-SXM-80GB", 61.26), rank("A100-SXM-80GB", 0)]
    planned: Any = SimpleNamespace(cost=SimpleNamespace(ranks=ranks))
    (line,) = host_lines(planned, known)
    host = known.ranks[0].device.host
    assert line.startswith("note: host memory beside H100-SXM-80GB: 61.3 of 200 GiB per GPU are used")
    assert host.estimate
    assert "both are assumed: say under host: in the cluster file what is there" in line


FABRICS = """\
name: two
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 2, network: {cards: 2, gbit_s: 400, fabric: infiniband}}
- {name: near, gpu: H100-SXM-80GB, gpus: 2, network: {cards: 2, gbit_s: 400, fabric: infiniband}}
- {name: far, gpu: H100-SXM-80GB, gpus: 2, network: {cards: 1, gbit_s: 0.5, latency_us: 7, fabric: roce}}
fabrics: [{meet: [infiniband, roce], gbit_s: 0.5, latency_us: 20, per: node}]
"""
ONE_NETWORK = """\
name: two
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 2, network: {gbit_s: 0.5, latency_us: 30}}
- {name: near, gpu: H100-SXM-80GB, gpus: 2, network: {gbit_s: 0.5, latency_us: 30}}
- {name: far, gpu: H100-SXM-80GB, gpus: 2, network: {gbit_s: 0.5, latency_us: 27}}
"""


def test_a_plan_over_two_fabrics_is_timed_over_the_cards_where_they_meet_too(tmp_path):
    for name, text in (("two.yaml", FABRICS), ("one.yaml", ONE_NETWORK)):
        (tmp_path / name).write_text(text)
    two, one = (read_cluster(tmp_path / name) for name in ("two.yaml", "one.yaml"))
    planned = make_planned(tiny_job(), two, [[[1], [1], [1], [1], [1], [1]]])
    (note,) = fabric_lines(planned, two)
    slower = estimate(planned.plan, planned.job, one).iteration_s / planned.cost.iteration_s - 1
    assert slower > 0.01
    assert "times count infiniband and roce side by side, which NCCL's variables do not give" in note
    assert f"this plan takes {slower:.1%} longer" in note
    inside = make_planned(tiny_job(), two, [[[1] * 4]], gpus=(0, 1, 2, 3))
    assert fabric_lines(inside, two) == []
    assert fabric_lines(make_planned(tiny_job(), one, [[[1] * 6]]), one) == []


def test_a_notebook_shows_reports_as_html(planned):
    for report in (planned_report(planned, FOUR), comparison_report(planned, FOUR)):
        shown = report._repr_mimebundle_([], [])
        assert "DOUBLE" in shown["text/plain"]
        assert shown["text/html"].startswith("<pre")
        assert "DOUBLE" in shown["text/html"]
        assert report._repr_html_() == shown["text/html"]
