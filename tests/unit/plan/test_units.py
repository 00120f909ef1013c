"""The table of units, above all of a plan whose one stage the job repeats."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import check_job
from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import job_experts
from megatron_hexi.options.job_terms import check_experts
from megatron_hexi.plan import Workload, dump_plan, read_plan
from megatron_hexi.plan.units import HeldExperts, domain_rows, rank_gpus, unit_rows
from megatron_hexi.report.tables import units_table
from megatron_hexi.report.unit_summary import unit_summaries
from tests.support.costs import tiny_job
from tests.support.expert_layouts import HEADER, LAYOUTS
from tests.support.expert_plans import expert_plan
from tests.support.plans import RANDOMS, TORN, examples, plans


@examples(100)
@given(plan=plans(most_replicas=3), stages=st.integers(1, 4), layers=st.integers(1, 5))
def test_a_repeated_stage_is_written_out_as_megatron_numbers_its_ranks(plan, stages, layers):
    width = plan.workload.tensor_parallel
    rows = unit_rows(plan, 2, stages, stages * layers)
    assert [rank for unit in rows for rank in unit.ranks] == list(range(stages * plan.units * width))
    for number, unit in enumerate(rows):
        stage, place = divmod(number, plan.units)
        member = plan.members[place]
        assert (unit.stage, unit.depth, unit.layers) == (
            stage,
            stages,
            (stage * layers, (stage + 1) * layers),
        )
        assert (unit.tokens, unit.heads, unit.state) == (member.tokens, member.heads, member.state)
        assert unit.ranks[0] == (stage * plan.units + place) * width
        assert member in plan.replicas[unit.replica].domain.groups[unit.group].members
        assert plan.replicas[unit.replica].domain.members[unit.member] == member
        assert (unit.samples, unit.micro_batches, unit.ministages, unit.offload) == ((0, 2), None, None, ())
        assert unit.is_last == (stage == stages - 1)


@examples(50)
@given(plan=plans(most_replicas=3), stages=st.integers(1, 4))
def test_each_stage_of_a_replica_has_one_row_for_its_domain(plan, stages):
    rows = domain_rows(plan, stages=stages)
    assert Counter((row.replica, row.stage) for row in rows) == Counter(
        (replica, stage) for replica in range(len(plan.replicas)) for stage in range(stages)
    )
    assert all(row.layers is None and row.exchange == plan.exchange for row in rows)


def test_ranks_have_the_gpus_of_the_file_or_those_that_the_plan_names():
    assert list(rank_gpus(TORN, 4)) == [0, 1, 2, 3]
    assert list(rank_gpus(replace(TORN, gpus=(7, 2, 5, 0, 1)), 8)) == [7, 2, 5, 0, 1]


#: A unit of two whole ranks, one that is cut, and one that holds nothing, before another copy of all.
MIXED = """\
version: 2
workload: {seq_length: 64, heads: 8, kv_heads: 4, head_dim: 16, layers: 6, experts: 8}
job: {micro_batch_size: 5}
replicas:
- stages:
  - layers: [0, 6]
    domains:
    - {ranks: [0, 1], samples: 1, experts: [[5, 8], [4, 5]]}
    - {ranks: [2, 3], samples: 1, experts: [0, 4]}
    - {ranks: [4], samples: 1, experts: [8, 8]}
    - {ranks: [5, 6], samples: 1}
    - {ranks: [7], samples: 1, experts: [[0, 8]]}
"""


def test_units_in_order_make_up_expert_domains(read):
    by_rank = job_experts(read(MIXED), 8)
    domains = {domain.ranks: domain for domain, _ in by_rank.values()}
    assert list(domains) == [(0, 1, 2, 3, 4), (5, 6), (7,)]
    assert [domain.copy for domain in domains.values()] == [0, 1, 2]
    assert [held for _, held in by_rank.values()][:6] == [
        HeldExperts(0, (5, 8)),
        HeldExperts(1, (4, 5)),
        HeldExperts(2, (0, 4), part=0, parts=2),
        HeldExperts(3, (0, 4), part=1, parts=2),
        HeldExperts(4, (8, 8)),
        HeldExperts(5, (0, 8), part=0, parts=2),
    ]
    first = domains[0, 1, 2, 3, 4]
    assert (first.width, first.has_slices, domains[7,].has_slices) == (4, True, False)
    assert first.slots == (5, 6, 7, None, 4, *[None] * 3, 0, 1, 2, 3, 0, 1, 2, 3, *[None] * 4)


@given(random=RANDOMS, ranks=st.integers(2, 12), experts=st.integers(1, 9))
def test_each_expert_domain_holds_every_expert_once(random, ranks, experts):
    workload = Workload(24, heads=4, kv_heads=2, head_dim=4, layers=random.randint(1, 5))
    plan = expert_plan(random, workload, random.randint(1, 4), ranks, experts)
    by_rank = job_experts(plan, experts)
    assert sorted(by_rank) == list(range(plan.ranks))
    copies: Counter[tuple[int, int]] = Counter()
    for replica in plan.replicas:
        for stage in replica.stages:
            own = {by_rank[rank][0].ranks: by_rank[rank][0] for one in stage.members for rank in one.ranks}
            for domain in own.values():
                assert set(domain.ranks) <= {rank for one in stage.members for rank in one.ranks}
                parts = [
                    (expert, one.part, one.parts) for one in domain.held for expert in range(*one.experts)
                ]
                assert len(parts) == len(set(parts))
                cut = {expert: of for expert, _, of in parts}
                assert sorted(parts) == [(e, p, cut[e]) for e in range(experts) for p in range(cut[e])]
                assert Counter(domain.slots)[None] == len(domain.slots) - len(parts)
                copies.update((layer, domain.copy) for layer in range(*(stage.layers or ())))
    assert set(copies.values()) == {1}
    assert {layer for layer, copy in copies if copy == 0} == set(range(workload.layers or 0))


@given(random=RANDOMS, ranks=st.integers(2, 10))
def test_what_is_written_is_read(random, ranks, tmp_path_factory):
    workload = Workload(24, heads=4, kv_heads=2, head_dim=4, layers=3)
    plan = expert_plan(random, workload, 2, ranks, experts=5)
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert read_plan(path) == plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_the_training_tests_are_written_and_read(name, read):
    plan = read(HEADER + LAYOUTS[name])
    assert read(dump_plan(plan)) == plan


def test_a_table_of_holdings_has_experts_where_units_say_them(read):
    def columns(text):
        plan = read(text)
        table = units_table(plan, unit_summaries(plan))
        return {column.header: list(column.cells) for column in table.columns}

    assert columns(MIXED)["experts"] == ["5-7, 4", "0-3", "none", "all", "0-7"]
    assert "experts" not in columns(HEADER + LAYOUTS["unstated"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (", experts: 8}", "}", ":2: workload.experts is missing, units hold some; give --num-experts here"),
        (", experts: 8}", ", experts: 0}", ":2: workload.experts = 0 is too small"),
        (
            "[[5, 8], [4, 5]]",
            "[[5, 8], [4, 5], [8, 8]]",
            ":8: replicas[0].stages[0].domains[0].experts has 3 ranges, the unit 2 ranks; give one range,",
        ),
        (
            "[0, 4]",
            "[0, 9]",
            ":9: replicas[0].stages[0].domains[1].experts [0, 9] ends after workload.experts",
        ),
        ("[0, 4]", "[4, 0]", "domains[1].experts [4, 0] runs backwards"),
        ("[0, 4]", "4", "domains[1].experts = 4 is not a list; write one"),
        ("[0, 4]", "[0, 4, 5]", "domains[1].experts"),
        ("[0, 4]", "[0, x]", "= 'x' is not a whole number; write one"),
        ("[0, 4]", "[]", "domains[1].experts"),
        (
            "[0, 4]",
            "[0, 5]",
            "domains[1].experts holds expert 4, which rank 1 of the expert domain holds already; a domain",
        ),
        (
            "[0, 4]",
            "[0, 3]",
            "domains[3].experts holds expert 0, which rank 2 of the expert domain holds already",
        ),
        (
            "[[0, 8]]",
            "[0, 7]",
            "experts leaves expert 7 to no unit: the expert domain of ranks [7] does not hold all 8; give it",
        ),
    ],
)
def test_a_broken_rule_names_its_place(old, new, says, read):
    assert MIXED.count(old) == 1
    with pytest.raises(PlanError) as refused:
        read(MIXED.replace(old, new))
    assert says in str(refused.value)


def test_domains_that_take_whole_micro_batches_hold_all_experts_each(read):
    text = HEADER + LAYOUTS["dealt"]
    with pytest.raises(PlanError, match="which takes whole micro-batches by itself, does not hold all 8"):
        read(
            text.replace("{ranks: [2], micro_batches: 1}", "{ranks: [2], micro_batches: 1, experts: [7, 8]}")
        )


def test_a_stage_that_the_job_repeats_has_megatrons_flags(read):
    plan = """\
version: 2
workload: {seq_length: 64, heads: 8, kv_heads: 4, head_dim: 16, experts: 8}
replicas:
- stages: [{domains: [{ranks: [0], experts: [0, 8]}]}]
"""
    with pytest.raises(PlanError, match="or leave it out and give --expert-model-parallel-size"):
        read(plan)


def job(**changes) -> Namespace:
    """Return those of Megatron's arguments that are read, of a job that fits `MIXED`."""
    usual = Namespace(
        num_experts=8,
        sequence_parallel=True,
        moe_router_load_balancing_type="aux_loss",
        moe_shared_expert_intermediate_size=64,
        moe_ffn_hidden_size=64,
        ffn_hidden_size=99,
        add_bias_linear=False,
        hexi_plan="plan.yaml",
    )
    return Namespace(**{**vars(usual), **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sequence_parallel": False},
            "ranks [0, 1] are a unit, and with tensor parallelism Megatron trains",
        ),
        ({"moe_shared_expert_intermediate_size": 63}, "ranks [0, 1] cut each shared expert in 2, which does"),
        ({"moe_ffn_hidden_size": 63}, "ranks [2, 3] cut each expert in 2, which does not divide"),
        ({"moe_ffn_hidden_size": None}, "which does not divide --moe-ffn-hidden-size 99"),
        ({"add_bias_linear": True}, "ranks [2, 3] cut each expert in 2, and each would add its biases; give"),
    ],
)
def test_a_job_whose_experts_a_plan_cannot_hold_is_refused(changes, says, read):
    plan = read(MIXED)
    check_experts(job(), plan)
    check_experts(job(num_experts=None, **changes), plan)
    with pytest.raises(PlanError) as refused:
        check_experts(job(**changes), plan)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            "replicas",
            "counts the micro-batches so far, which other replicas run at other times; use aux_loss",
        ),
        (
            "ministages",
            "counts the micro-batches so far, which ministages run in another order; use aux_loss",
        ),
        ("uneven", None),
    ],
)
@pytest.mark.parametrize("kinds", ["global_aux_loss", ["aux_loss", "global_aux_loss"]])
def test_a_running_mean_is_refused_where_micro_batches_run_in_another_order(kinds, layout, says, read):
    plan, args = read(HEADER + LAYOUTS[layout]), job(moe_router_load_balancing_type=kinds)
    if says is None:
        check_experts(args, plan)
        return
    with pytest.raises(PlanError) as refused:
        check_experts(args, plan)
    assert says in str(refused.value)


def test_the_cost_model_refuses_a_plan_for_other_experts(read):
    with pytest.raises(PlanError, match=r"workload\.experts: the plan is for 8, but the job has 0"):
        check_job(read(MIXED), tiny_job())
