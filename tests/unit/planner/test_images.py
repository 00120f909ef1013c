"""Images of a sequence in plans: how units divide them, and the table of a first stage, which encodes."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.models import Images
from megatron_hexi.models.vision import Vision
from megatron_hexi.plan import Plan, Replica, Stage
from megatron_hexi.plan.proportion import proportional_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.baselines.race import best_uneven
from megatron_hexi.planner.expert_placement import IN_WHOLE_STAGES
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pools import StageShape
from megatron_hexi.planner.joint.stage_tables import StageTables
from megatron_hexi.planner.layouts.images import divided_images, image_seconds
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves import layer_moves
from megatron_hexi.planner.moves.memory import MemoryMoves
from tests.support.costs import TINY, cluster, tiny_job
from tests.unit.planner.test_savings import machines as with_memory

VISION = Vision(layers=4, hidden_size=512, heads=4, ffn_hidden_size=2048, patch_values=192)
MODEL = replace(TINY, layers=8, vision=VISION)
IMAGES = Images(per_sequence=48, patches=256)
JOB = tiny_job(model=MODEL, seq_length=8192, global_batch_size=8, images=IMAGES)
#: One sequence, which all GPUs share.
ALONE = replace(JOB, global_batch_size=1)
MACHINES = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)])


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_the_last_unit_ends_as_early_as_whole_images_allow(count):
    job = replace(JOB, images=Images(count, 64))
    domain = proportional_plan(job.workload(), [[[1, 1], [1]]]).replicas[0].domain
    gpus = [MACHINES.ranks[gpu] for gpu in (0, 2, 3)]
    found: Any = divided_images(domain, job, MACHINES, lambda rank: gpus[rank]).members
    seconds = [image_seconds(gpu.device, MACHINES.nodes[gpu.node], job) for gpu in gpus]
    assert sum(member.patches for member in found) == count * 64
    assert {member.patches % 64 for member in found} == {0}
    ends = max(member.patches // 64 * each for member, each in zip(found, seconds, strict=True))
    choices = (one for one in itertools.product(range(count + 1), repeat=3) if sum(one) == count)
    best = min(max(own * each for own, each in zip(one, seconds, strict=True)) for one in choices)
    assert ends == pytest.approx(best)


def test_images_that_are_not_divided_leave_a_domain_as_it_is():
    domain = proportional_plan(JOB.workload(), [[[1, 1]]]).replicas[0].domain
    gpu = MACHINES.ranks[0]
    for images in (None, replace(IMAGES, divided=False)):
        job = replace(JOB, images=images)
        assert divided_images(domain, job, MACHINES, lambda _: gpu) is domain


def test_plans_divide_images_and_are_faster_for_it():
    plans: list[Any] = [
        find_plan(Request(replace(ALONE, images=replace(IMAGES, divided=divided)), effort="low"), MACHINES)
        for divided in (True, False)
    ]
    dealt, whole = (planned.cost.iteration_s for planned in plans)
    assert dealt < 0.9 * whole
    for replica in plans[0].plan.replicas:
        first, *others = replica.stages
        together = sum(member.patches for member in first.members)
        assert together % (IMAGES.per_sequence * IMAGES.patches) == 0 < together
        assert all(member.patches is None for stage in others for member in stage.members)
    assert all(member.patches is None for member in plans[1].plan.members)


def test_a_first_stage_has_the_encoder_in_its_table():
    request = Request(ALONE)
    timer = LayerTimer(
        replace(request.job, recompute="selective"),
        MACHINES,
        [1],
        IN_WHOLE_STAGES,
        ("none", "selective", "full"),
    )
    tables: Any = StageTables(request, timer, timer.pools)
    shape = StageShape((2, 0), 1)
    first, later = (tables.table(shape, 1, is_first, False, 1, True).seconds for is_first in (True, False))
    layer: Any = timer.layer(shape, True)
    assert layer.first.seconds > 0
    assert first - later == pytest.approx(layer.first.seconds)


def test_a_first_stage_keeps_the_layers_that_add_features():
    further = replace(JOB, model=replace(MODEL, vision=replace(VISION, deepstack=3)), global_batch_size=1)
    timer = LayerTimer(
        replace(further, recompute="selective"), MACHINES, [1], IN_WHOLE_STAGES, ("none", "selective", "full")
    )
    tables: Any = StageTables(Request(further), timer, timer.pools)
    first = tables.table(StageShape((2, 0), 1), 1, True, False, 1, True).seconds
    assert first[0] == first[1] == first[2] < first[3]
    search = PipelineSearch(Request(further), tables)
    slow: Any = search.layered([StageShape((0, 1), 1), StageShape((2, 0), 1)], 1, 1)
    assert slow.stages[0].layers == 3


def test_pipelines_whose_first_stages_would_lack_such_layers_are_passed_over():
    further = replace(JOB, model=replace(MODEL, layers=4, vision=replace(VISION, deepstack=3)))
    assert best_uneven(Request(further), MACHINES) == (None, 0)
    further = replace(further, global_batch_size=1)
    again = replace(further, recompute="selective")
    timer = LayerTimer(again, MACHINES, [1], IN_WHOLE_STAGES, ("none", "selective", "full"))
    search = PipelineSearch(Request(further), StageTables(Request(further), timer, timer.pools))
    three = [StageShape((1, 0), 1), StageShape((1, 0), 1), StageShape((0, 1), 1)]
    assert search.layered(three, 1, 1) is None


@pytest.mark.parametrize("images", [IMAGES, None])
def test_layers_may_leave_a_first_stage_the_images_alone(images: Images | None):
    job = replace(JOB, images=images)
    domains = [proportional_plan(JOB.workload(), [[[1, 1]]]).replicas[0].domain for _ in range(2)]
    later = domains[1].with_members(lambda member: replace(member, ranks=(member.ranks[0] + 2,)))
    stages = Stage((domains[0],), layers=(0, 1)), Stage((later,), layers=(1, 8))
    plan = Plan(JOB.workload(), (Replica(stages, 8),))
    base = Candidate(plan, job, CostModel(job, MACHINES).timing(plan))
    moves = {move.plan.replicas[0].stages[0].layers: move for move in layer_moves(base)}
    assert moves.keys() == ({(0, 0), (0, 2)} if images else {(0, 2)})
    if images:
        apart = moves[0, 0]
        _, seconds = apart.least
        assert 0 < seconds <= CostModel(job, MACHINES).timing(apart.plan).phases.total * (1 + 1e-9)


@pytest.mark.parametrize(("deepstack", "counts"), [(0, {2, 3, 4}), (2, {2, 3}), (4, set[int]())])
def test_first_ministages_keep_the_layers_that_add_features(deepstack: int, counts: set[int]):
    job = replace(JOB, model=replace(MODEL, vision=replace(VISION, deepstack=deepstack)))
    domains = [proportional_plan(JOB.workload(), [[[1, 1]]]).replicas[0].domain for _ in range(2)]
    later = domains[1].with_members(lambda member: replace(member, ranks=(member.ranks[0] + 2,)))
    stages = Stage((domains[0],), layers=(0, 4)), Stage((later,), layers=(4, 8))
    plan = Plan(JOB.workload(), (Replica(stages, 8),))
    base = Candidate(plan, job, CostModel(job, MACHINES).timing(plan))
    moves = [move.plan.replicas[0] for move in MemoryMoves(Request(job), MACHINES)(base)]
    assert {own.ministages for own in moves if own.is_interleaved} == counts
    for replica in moves:
        CostModel(job, MACHINES).timing(replace(plan, replicas=(replica,)))


@pytest.mark.parametrize(
    ("deepstack", "ministages", "left"),
    [(0, None, {2, 4}), (2, None, {2, 4}), (0, 3, {4}), (2, 2, {4}), (1, 2, {2, 4}), (3, None, {4})],
)
def test_layers_stay_in_the_first_ministage_that_add_features(
    deepstack: int, ministages: int | None, left: set[int]
):
    job = replace(JOB, model=replace(MODEL, vision=replace(VISION, deepstack=deepstack)))
    domains = [proportional_plan(JOB.workload(), [[[1, 1]]]).replicas[0].domain for _ in range(2)]
    later = domains[1].with_members(lambda member: replace(member, ranks=(member.ranks[0] + 2,)))
    stages = tuple(
        Stage((domain,), layers=layers, ministages=ministages)
        for domain, layers in ((domains[0], (0, 3)), (later, (3, 8)))
    )
    plan = Plan(JOB.workload(), (Replica(stages, 8),))
    base = Candidate(plan, job, CostModel(job, MACHINES).timing(plan))
    assert {move.plan.replicas[0].stages[0].layers for move in layer_moves(base)} == {(0, n) for n in left}


def test_images_that_fit_in_ministages_alone_are_planned_in_them():
    deep = replace(JOB, model=replace(MODEL, layers=32), images=Images(8, 256), global_batch_size=4)
    machines = with_memory(2.2, size=1)
    planned: Any = find_plan(Request(deep, effort="low"), machines)
    assert planned.cost.fits
    assert planned.plan.has_ministages
    assert any(member.patches for member in planned.plan.members)
    with pytest.raises(NothingFitsError):
        find_plan(Request(deep, rules=PlannerRules(ministages=False), effort="low"), machines)


@pytest.mark.parametrize(("memory", "whole"), [(0.8, False), (0.9, True)])  # of 0.80 GiB or, again, 0.29
def test_a_stage_is_offered_what_leaves_room_for_its_images(memory: float, whole: bool):
    small = with_memory(memory, gpus=("H100-SXM-80GB",), size=4)
    domains = [proportional_plan(JOB.workload(), [[[1, 1]]]).replicas[0].domain for _ in range(2)]
    later = domains[1].with_members(lambda member: replace(member, ranks=(member.ranks[0] + 2,)))
    stages = Stage((domains[0],), layers=(0, 4)), Stage((later,), layers=(4, 8))
    plan = Plan(JOB.workload(), (Replica(stages, 8),))
    base = Candidate(plan, JOB, CostModel(JOB, small).timing(plan))
    moves = MemoryMoves(Request(JOB), small)(base)
    offers = [
        {place: {option.recompute for option in options} for place, options in ladder.items()}
        for move in moves
        if not move.plan.replicas[0].is_interleaved
        for ladder in move.ladders
    ]
    assert len(offers) > 2
    for offer in filter(None, offers):
        assert ("none" in offer[0, 0]) == whole
        assert {"none", "full"} <= offer[0, 1]
        assert "full" in offer[0, 0]
