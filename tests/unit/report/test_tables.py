"""Reports: every number in a table or a picture comes from the plan, and all of the plan is in it."""

import io
from dataclasses import replace

import pytest
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb
from matplotlib.figure import Figure
from rich.console import Console

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import (
    Domain,
    Estimate,
    Group,
    Member,
    Plan,
    Provenance,
    Replica,
    Stage,
    Workload,
    proportional_plan,
    validate_plan,
)
from megatron_hexi.planner.moves.edit import with_members
from megatron_hexi.report.pictures import draw_plan, save_picture
from megatron_hexi.report.tables import plan_report
from megatron_hexi.report.unit_summary import unit_summaries
from megatron_hexi.spelling import spell_bytes, spell_range
from tests.support.expert_layouts import expert_layout

WORKLOAD = Workload(seq_length=4096, heads=16, kv_heads=4, head_dim=64)


def text_of(plan: Plan) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(plan_report(plan, unit_summaries(plan)))
    return stream.getvalue()


@pytest.fixture
def two_replicas():
    return proportional_plan(WORKLOAD, [[[2, 2], [1, 1]], [[1, 1, 1]]])


def test_holdings_partition_every_sequence(two_replicas):
    rows = unit_summaries(two_replicas)
    assert [row.rank for row in rows] == list(range(7))
    for replica in (0, 1):
        mine = [row for row in rows if row.replica == replica]
        positions = sorted(p for row in mine for start, stop in row.segments for p in range(start, stop))
        assert positions == list(range(4096))
        assert sum(row.share for row in mine) == pytest.approx(1)
        assert all(row.tokens == sum(stop - start for start, stop in row.segments) for row in mine)


def test_holdings_count_traffic_by_hand():
    # Two groups of one rank each: no all-to-all. The outer group holds [0, 1024) and [3072, 4096), so its
    # back half sees all 2048 keys of the inner one, and all the inner one's queries see its front half.
    rows = unit_summaries(proportional_plan(WORKLOAD, [[[1], [1]]]))
    key_bytes = 2 * 4 * 64 * 2  # key and value of 4 KV heads of 64, two bytes each
    assert [row.forward.message_bytes for row in rows] == [1024 * key_bytes, 2048 * key_bytes]
    assert [row.forward.all_to_all_bytes for row in rows] == [0, 0]
    # Backward sends the keys again, and the gradients of those received.
    assert [row.backward.message_bytes for row in rows] == [3072 * key_bytes, 3072 * key_bytes]


def test_ranks_need_not_follow_the_groups():
    groups = (
        Group(((0, 1000),), (Member((0,), 500, (0, 8)), Member((2,), 500, (8, 16)))),
        Group(((1000, 4096),), (Member((1,), 3096, (0, 16)),)),
    )
    plan = Plan(Workload(4096, 16, 4, 64, causal=False), (Replica((Stage((Domain(groups),)),)),))
    validate_plan(plan)
    assert [(row.rank, row.group, row.tokens) for row in unit_summaries(plan)] == [
        (0, 0, 500),
        (1, 1, 3096),
        (2, 0, 500),
    ]


def test_table_shows_what_the_plan_says(two_replicas):
    text = text_of(two_replicas)
    assert "4,096 tokens, 16 heads of 64, 4 kv heads, causal" in text
    assert "replica" in text
    for row in unit_summaries(two_replicas):
        assert any(
            f"{row.tokens:,}" in line and f"{row.share:.1%}" in line and spell_range(row.heads) in line
            for line in text.splitlines()
        )


def test_table_of_a_rank_without_work():
    group = Group(((0, 4096),), (Member((0,), 4096, (0, 16)), Member((1,), 0, (16, 16))))
    plan = Plan(WORKLOAD, (Replica((Stage((Domain((group,)),)),)),))
    validate_plan(plan)
    (line,) = (line for line in text_of(plan).splitlines() if " 0.0%" in line)
    assert line.count("none") == 3  # heads, KV heads, positions


def test_group_names_are_no_markup():
    group = Group(((0, 4096),), (Member((0,), 4096, (0, 16)),), name="[red]a")
    assert "[red]a" in text_of(Plan(WORKLOAD, (Replica((Stage((Domain((group,)),)),)),)))


def test_estimate_and_provenance_are_shown_where_given():
    plain = proportional_plan(WORKLOAD, [[[1, 1]]])
    assert "estimate" not in text_of(plain)
    told = Plan(
        plain.workload,
        plain.replicas,
        estimate=Estimate(iteration_s=1.25, tokens_per_s=26214.4, gap=0.031, against={"ring": 17000.0}),
        provenance=Provenance(planner="exact", seed=0),
    )
    text = text_of(told)
    assert "estimate: 1.250 s per iteration, 26,214 tokens/s" in text
    assert any("ring" in line and "17,000" in line and "1.54x" in line for line in text.splitlines())
    assert "made: by exact, seed 0" in text


def test_bound_and_gap_are_shown_together():
    plain = proportional_plan(WORKLOAD, [[[1, 1]]])
    told = replace(plain, estimate=Estimate(iteration_s=1.25, lower_bound_s=1.0, gap=0.25))
    text = text_of(told)
    assert "no plan takes less than 1.000 s, this one takes at most 25.0% longer than the best" in text
    assert "predicted instead" not in text


def test_other_layouts_are_listed_fastest_first():
    plain = proportional_plan(WORKLOAD, [[[1, 1]]])
    against = {"ring": 100.0, "[red]usp": 200.0, "nothing": 0.0}
    text = text_of(replace(plain, estimate=Estimate(tokens_per_s=400.0, against=against)))
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.count("│") == 4]
    table = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    assert table == [["[red]usp", "200", "2.00x"], ["ring", "100", "4.00x"], ["nothing", "0", "-"]]


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ((0, 1, 2), "in rank order: 0-2\n"),
        ((4, 6, 7), "in rank order: 4, 6-7\n"),
        ((1, 2, 0), "in rank order: 1-2, 0\n"),
        (None, None),
    ],
)
def test_a_plan_that_names_its_gpus_says_so(gpus, text):
    shown = text_of(replace(proportional_plan(WORKLOAD, [[[1, 1, 1]]]), gpus=gpus))
    if text is None:
        assert "must be started" not in shown
    else:
        assert f"ranks must be started on these GPUs of the cluster file, {text}" in shown


@pytest.mark.parametrize(
    ("span", "text"), [((0, 8), "0-7"), ((7, 8), "7"), ((8, 8), "none")], ids=["many", "one", "none"]
)
def test_spell_range(span, text):
    assert spell_range(span) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_spell_bytes(count, text):
    assert spell_bytes(count) == text


def test_picture_has_every_segment_and_head_range(two_replicas):
    rows = unit_summaries(two_replicas)
    sequence, heads = draw_plan(two_replicas, rows).axes

    def bars(axes):
        """(row, colour) -> half-open ranges drawn there."""
        drawn: dict[tuple[int, str], set[tuple[int, int]]] = {}
        for collection in axes.collections:
            for path in collection.get_paths():
                (left, bottom), (right, top) = path.get_extents().min, path.get_extents().max
                key = (round((bottom + top) / 2), to_hex(collection.get_facecolor()[0]))
                drawn.setdefault(key, set()).add((round(left), round(right)))
        return drawn

    assert sorted(map(sorted, bars(sequence).values())) == sorted(sorted(row.segments) for row in rows)
    assert sorted(map(sorted, bars(heads).values())) == sorted([row.heads] for row in rows)
    assert {row for row, _ in bars(sequence)} == {0, 1}
    assert [label.get_text() for label in heads.get_yticklabels()] == [
        "replica 0: group-0",
        "replica 0: group-1",
        "replica 1: group-0",
    ]


def test_picture_has_a_title_and_a_hue_for_each_kind_of_gpu(two_replicas):
    made = Provenance(model="models/some-7b", cluster="mixed")
    plan = replace(two_replicas, provenance=made, estimate=Estimate(tokens_per_s=12345.6))
    gpus = ["FAST"] * 4 + ["SLOW"] * 3
    figure = draw_plan(plan, unit_summaries(plan), gpus)
    assert figure.get_suptitle() == "some-7b, 4K tokens, 7 ranks of mixed, predicted 12,346 tokens/s"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FAST", "SLOW"]

    def hue(colour):
        return round(rgb_to_hsv(to_rgb(colour))[0], 1)

    named = [hue(patch.get_facecolor()) for patch in legend.get_patches()]
    assert len(set(named)) == 2
    # In the order of the rows: replica 0 has four ranks of one kind, replica 1 three of the other.
    for axes in figure.axes:
        drawn = [hue(collection.get_facecolor()[0]) for collection in axes.collections]
        assert drawn == [named[0]] * 4 + [named[1]] * 3


def test_picture_of_stages_has_their_layers_and_kinds_by_nodes():
    """Node names tell kinds without a cluster."""

    def stage(name, ranks, heads, layers):
        member = Member(ranks, 4096, (0, heads))
        return Stage((Domain((Group(((0, 4096),), (member,), name=name),)),), layers=layers)

    stages = (stage("fast-0/0", (0, 1), 8, (0, 1)), stage("slow-1/0", (2, 3, 4, 5), 4, (1, 2)))
    workload = replace(WORKLOAD, layers=2, tensor_parallel=0)
    plan = Plan(workload, (Replica(stages),), provenance=Provenance(cluster="mixed"))
    figure = draw_plan(plan, unit_summaries(plan))
    (layers,) = figure.axes  # a unit alone in its stage divides neither tokens nor heads
    assert layers.get_xlim() == (0, 2)
    drawn = [path.get_extents() for bars in layers.collections for path in bars.get_paths()]
    assert sorted((bar.x0, bar.x1) for bar in drawn) == [(0, 1), (1, 2)]
    assert [label.get_text() for label in layers.get_yticklabels()] == ["replica 0"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fast", "slow"]


def test_picture_of_units_of_several_ranks_has_all_their_heads():
    member = [Member((2 * n, 2 * n + 1), 2048, (4 * n, 4 * n + 4)) for n in range(2)]
    stage = Stage((Domain((Group(((0, 4096),), tuple(member), name="node/0"),)),), layers=(0, 2))
    plan = Plan(replace(WORKLOAD, layers=2, tensor_parallel=2), (Replica((stage,)),))
    heads = draw_plan(plan, unit_summaries(plan)).axes[-1]
    drawn = [path.get_extents() for bars in heads.collections for path in bars.get_paths()]
    assert [(bar.x0, bar.x1) for bar in drawn] == [(0, 8), (8, 16)]
    assert [label.get_text() for label in heads.get_yticklabels()] == ["replica 0, stage 0: node"]


def test_picture_has_the_experts_of_each_rank(tmp_path):
    """Three experts beside five that two ranks cut; then five and three, and a rank that holds all."""
    plan = expert_layout("slices", tmp_path)
    experts = draw_plan(plan, unit_summaries(plan)).axes[-1]
    drawn = [path.get_extents() for bars in experts.collections for path in bars.get_paths()]
    bars = sorted((round(bar.y0 + 0.4), bar.x0, bar.x1) for bar in drawn)
    assert bars == [(0, 0, 3), (0, 3, 8), (1, 0, 5), (1, 5, 8), (2, 0, 8)]
    names = ["stage 0", "stage 1, expert domain 0", "stage 1, expert domain 1"]
    rows = [label.get_text().replace("\n", " ") for label in experts.get_yticklabels()]
    assert rows == [f"replica 0, {name}" for name in names]
    assert {"2", "3", "4", "5", "0-1: a slice of each"} <= {text.get_text() for text in experts.texts}


def test_picture_counts_whole_tokens_and_heads(two_replicas):
    sequence, heads = draw_plan(two_replicas, unit_summaries(two_replicas)).axes
    assert all(tick == int(tick) for axes in (sequence, heads) for tick in axes.get_xticks())
    longer = proportional_plan(replace(WORKLOAD, seq_length=2**17), [[[1, 1]]])
    sequence, _ = draw_plan(longer, unit_summaries(longer)).axes
    names = [sequence.xaxis.get_major_formatter()(tick, None) for tick in sequence.get_xticks()]
    assert {"0", "16K", "64K", "128K"} <= set(names)


@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.PDF"])
def test_picture_in_the_format_of_its_name(two_replicas, tmp_path, name):
    path = tmp_path / name
    save_picture(draw_plan(two_replicas, unit_summaries(two_replicas)), path)
    assert path.stat().st_size > 1000


def test_picture_in_an_unknown_format_is_refused(two_replicas, tmp_path):
    figure = draw_plan(two_replicas, unit_summaries(two_replicas))
    with pytest.raises(HexiError, match=r"unknown format; end its name in \.") as error:
        save_picture(figure, tmp_path / "plan.xyz")
    assert "plan.xyz" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["$\\frac{$", "$x$ and $y$", "a_b^c", "\\$5"])
def test_names_are_drawn_as_they_are_written(name, two_replicas, tmp_path):
    """Not as mathematics, as matplotlib reads what dollar signs enclose."""
    replica = two_replicas.replicas[0]
    group = replace(replica.domain.groups[0], name=name)
    domain = replace(replica.domain, groups=(group, *replica.domain.groups[1:]))
    first = replace(replica, stages=(replace(replica.stages[0], domains=(domain,)),))
    plan = replace(two_replicas, replicas=(first, *two_replicas.replicas[1:]))
    save_picture(draw_plan(plan, unit_summaries(plan)), tmp_path / "plan.svg")
    assert name in (tmp_path / "plan.svg").read_text()  # as a comment above its glyphs
    save_picture(draw_plan(plan, unit_summaries(plan)), tmp_path / "plan.png")


def test_powers_on_logarithmic_axes_stay_mathematics(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_ylim(1e-9, 1)
    axes.set_ylabel("cost in $ of $")
    save_picture(figure, tmp_path / "log.svg")
    drawn = (tmp_path / "log.svg").read_text()
    assert "cost in $ of $" in drawn
    assert r"$\mathdefault{10^{-8}}$" in drawn


def test_the_table_lists_stages_in_order_whatever_their_ranks():
    def stage(rank, layers):
        group = Group(((0, 4096),), (Member((rank,), 4096, (0, 16)),))
        return Stage((Domain((group,)),), layers=layers)

    stages = (stage(2, (0, 1)), stage(0, (1, 2)), stage(1, (2, 3)))
    plan = Plan(replace(WORKLOAD, layers=3), (Replica(stages),))
    lines = [line.split("│")[1:5] for line in text_of(plan).splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line[:3]] for line in lines] == [
        ["0", "0", "2"],
        ["1", "1", "0"],
        ["2", "2", "1"],
    ]


def test_units_in_bf16_of_a_job_in_fp8_are_told_apart():
    plan = proportional_plan(WORKLOAD, [[[1], [1]]])
    (stage,) = plan.replicas[0].stages
    outer, inner = stage.domains[0].groups
    plain = replace(inner, members=(replace(inner.members[0], precision="bf16"),))
    stages = (replace(stage, domains=(Domain((outer, plain)),)),)
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=stages),))
    figure = draw_plan(plan, unit_summaries(plan), ["H100", "A100"])
    kinds = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert kinds == ["H100", "A100, in bf16"]
    assert "precision" in text_of(plan)


def test_weights_by_which_images_are_divided_are_shown_of_units_that_have_some():
    plan = proportional_plan(WORKLOAD, [[[1], [1]]])
    assert "patches" not in text_of(plan)
    plan = with_members(plan, lambda member: replace(member, patches=8192 * (1 + member.lead)))
    assert {row.patches for row in unit_summaries(plan)} == {8192, 16384}
    assert all(word in text_of(plan) for word in ("patches", "8,192", "16,384"))
