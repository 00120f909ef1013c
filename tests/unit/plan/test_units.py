"""The table of units, above all of a plan whose one stage the job repeats."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan.units import domain_rows, rank_gpus, unit_rows
from tests.support.plans import TORN, examples, plans


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
