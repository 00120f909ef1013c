"""Where ranks stand in plans whose stages differ: every rank once, and what follows from it."""

import itertools
from collections import Counter

import pytest
from hypothesis import given

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import held_rows
from megatron_hexi.plan import Domain, Group, Member, Replica, Stage, Workload
from tests.support.plans import examples
from tests.support.stage_plans import boxes_of, job_plan, meshes


@examples(150)
@given(mesh=meshes())
def test_every_rank_stands_once_and_where_the_plan_has_it(mesh):
    assert len(mesh.units) == mesh.plan.ranks
    stands: Counter[int] = Counter()
    for r, replica in enumerate(mesh.plan.replicas):
        for s, stage in enumerate(replica.stages):
            for d, domain in enumerate(stage.domains):
                for m, member in enumerate(domain.members):
                    for rank in member.ranks:
                        unit = mesh.units[rank]
                        assert (unit.replica, unit.stage, unit.number, unit.member) == (r, s, d, m)
                        assert (unit.ranks, unit.tokens, unit.heads, unit.state) == (
                            *(member.ranks, member.tokens, member.heads, member.state),
                        )
                        assert member in domain.groups[unit.group].members
                        assert (unit.domain, unit.layers, unit.depth) == (
                            *(domain, stage.layers, len(replica.stages)),
                        )
                        stands[rank] += 1
    assert stands == Counter(range(mesh.plan.ranks))


@examples(100)
@given(mesh=meshes())
def test_the_domains_of_a_stage_take_each_sample_once(mesh):
    for r, replica in enumerate(mesh.plan.replicas):
        for s in range(len(replica.stages)):
            taken = {
                (unit.number, unit.samples) for unit in mesh.units if (unit.replica, unit.stage) == (r, s)
            }
            samples = [sample for _, (start, stop) in sorted(taken) for sample in range(start, stop)]
            assert samples == list(range(mesh.micro_batch_size))


@examples(100)
@given(mesh=meshes())
def test_a_chain_has_a_rank_of_each_stage_and_its_own_at_its_place(mesh):
    for rank, unit in enumerate(mesh.units):
        chain = mesh.pipeline_ranks(rank)
        assert chain[unit.stage] == rank
        assert [mesh.units[other].stage for other in chain] == list(range(unit.depth))
        assert {mesh.units[other].replica for other in chain} == {unit.replica}


@examples(100)
@given(mesh=meshes())
def test_ranks_of_a_group_are_in_one_order_in_the_unit_and_in_the_domain(mesh):
    """Process groups number their ranks in ascending order; tables number them as units and domains do."""
    for rank, unit in enumerate(mesh.units):
        lane = mesh.context_ranks(rank)
        assert list(lane) == sorted(lane)
        assert lane[unit.member] == rank
        assert list(unit.ranks) == sorted(unit.ranks)
        assert rank in unit.ranks


@examples(150)
@given(mesh=meshes())
def test_every_part_of_a_weight_has_one_copy_0_and_no_two_alike(mesh):
    """As the boxes of checkpoints count: holders of one box, apart from ranks that share a unit."""
    copies: dict[tuple, list[int]] = {}
    for rank, boxes in enumerate(boxes_of(mesh)):
        unit = mesh.units[rank]
        for box in boxes:
            if box.key == "embedding" and box.depth > 0:
                continue  # Megatron counts the copy behind the layers apart
            shared = unit.ranks.index(rank) if box.key.endswith("norm") else 0  # likewise
            for index in itertools.product(*(range(*span) for span in box.cell)):
                copies.setdefault((box.key, shared, index), []).append(mesh.copy(unit))
    for (_, shared, _), found in copies.items():
        assert len(set(found)) == len(found)
        if shared == 0:
            assert found.count(0) == 1


@examples(150)
@given(mesh=meshes())
def test_loss_ranks_hold_each_token_of_each_sample_once(mesh):
    found: Counter[tuple[int, int, int]] = Counter()
    for rank in mesh.loss_ranks():
        unit = mesh.units[rank]
        assert unit.is_last
        # A loss is of the whole unit, whatever part of the rows its ranks hold between layers.
        for other in unit.ranks if mesh.sequence_parallel else [rank]:
            for span in held_rows(mesh, other).positions:
                for position, sample in itertools.product(range(*span), range(*unit.samples)):
                    found[unit.replica, position, sample] += 1
    length, replicas = mesh.plan.workload.seq_length, len(mesh.plan.replicas)
    everything = itertools.product(range(replicas), range(length), range(mesh.micro_batch_size))
    assert found == Counter(everything)


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ([(1, 0), (2, 3)], "domains[0].groups[0].members[0].ranks is [1, 0]; write [0, 1], ascending"),
        (
            [(0, 3), (1, 2)],
            "domains[0].groups have the units [0, 3] and [1, 2], whose ranks are not all in one order",
        ),
    ],
)
def test_ranks_that_process_groups_would_number_otherwise_are_refused(units, says):
    group = Group(((0, 8),), tuple(Member(unit, 4, (i, i + 1)) for i, unit in enumerate(units)))
    alone = Group(((0, 8),), (Member((4,), 8, (0, 4)),))
    stages = (Stage((Domain((group,)),), layers=(0, 1)), Stage((Domain((alone,)),), layers=(1, 2)))
    with pytest.raises(PlanError) as refused:
        job_plan(Workload(8, 4, 4, 4, layers=2), [Replica(stages)], micro_batch_size=1)
    assert says in str(refused.value)
