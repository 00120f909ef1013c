"""fp8 beside bf16 in plans: which units state it, shares in steps of rows, and what Megatron's flags do."""

from dataclasses import replace

import pytest

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.fp8 import units_in_bf16
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import Domain, Exchange, Group, Member, Plan, Replica, Stage, validate_plan
from megatron_hexi.plan.layout import causal_segments
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.moves.edit import with_members
from megatron_hexi.planner.precision import with_precision
from megatron_hexi.replan.planning.recut import recut
from tests.support.costs import cluster

H100, A100, B200 = "H100-SXM-80GB", "A100-SXM-80GB", "B200-180GB"
MIXED = cluster([("h", H100, 2), ("a", A100, 2)], bandwidth=100)
MODEL = replace(presets()["llama3-8b"], layers=2)
JOB = Job(MODEL, 8192, global_batch_size=2, precision="fp8", fp8_recipe="tensorwise")


def of_groups(job, *tokens):
    """A plan of one replica, a group of one member for each number of tokens."""
    workload = job.workload()
    groups = tuple(
        Group(held, (Member((rank,), own, (0, workload.local_heads)),))
        for rank, (own, held) in enumerate(zip(tokens, causal_segments(tokens), strict=True))
    )
    replica = Replica((Stage((Domain(groups),)),), 2)
    plan = Plan(workload, (replica,), Exchange())
    validate_plan(plan)
    return plan


def test_a_plan_has_bf16_where_a_gpu_lacks_fp8_and_tokens_in_steps_of_rows():
    request = Request(JOB, frozenset({"data_parallel"}), context_parallel=4)
    planned = find_plan(request, MIXED, with_baselines=True)
    members = {member.lead: member for member in planned.plan.members}
    assert [members[rank].precision for rank in range(4)] == [None, None, "bf16", "bf16"]
    assert all(member.tokens % 16 == 0 for member in members.values())
    assert members[0].tokens > members[2].tokens
    assert any(note.startswith("A100-SXM-80GB: in bf16") for note in planned.notes)
    assert not units_in_bf16(planned.plan, planned.job, MIXED)
    # What the plan states is what was timed.
    assert CostModel(planned.job, MIXED).timing(planned.plan).phases.total == planned.cost.iteration_s
    # Faster than in bf16; all ranks of Megatron's flags compute in one precision.
    plain = find_plan(replace(request, job=JOB.in_bf16), MIXED)
    assert planned.cost.iteration_s < plain.cost.iteration_s
    uniform = next(one for one in planned.baselines if one.name == "usp")
    assert uniform.trial is not None
    assert uniform.trial.job.precision == "bf16"


def test_a_unit_that_states_bf16_is_timed_so_on_a_gpu_with_fp8():
    both, plan = cluster([("h", H100, 2)], bandwidth=100), of_groups(JOB, 4096, 4096)
    model = CostModel(JOB, both)
    low, plain = (CostModel(job, both).timing(plan) for job in (JOB, JOB.in_bf16))
    groups = plan.replicas[0].stages[0].domains[0].groups
    stated = tuple(replace(one, members=(replace(one.members[0], precision="bf16"),)) for one in groups)

    def timed(groups):
        domain = Domain(tuple(groups))
        return model.timing(replace(plan, replicas=(Replica((Stage((domain,)),), 2),)))

    assert timed(stated).phases == plain.phases
    mixed = timed((groups[0], stated[1]))
    assert low.phases.total < mixed.phases.total
    for place, alike in enumerate((low, plain)):
        weights = [timing.memory[0]["weights"] + 0.0 for timing in (mixed, alike)]
        assert weights[0].ravel()[place] == weights[1].ravel()[-1]


def test_units_of_a_repeated_stage_get_stages_of_their_own_precision():
    job = replace(JOB, pipeline_parallel=2)
    plan, written = with_precision(of_groups(job, 4096, 4096), job, MIXED)
    assert written.pipeline_parallel == 1
    stages = plan.replicas[0].stages
    assert [stage.layers for stage in stages] == [(0, 1), (1, 2)]
    precisions = [{m.precision for g in stage.domains[0].groups for m in g.members} for stage in stages]
    assert precisions == [{None}, {"bf16"}]


def test_a_plan_that_is_cut_again_keeps_the_precision_of_its_units():
    equal, shares = of_groups(JOB, *4 * (2048,)), []
    for plain in ((2, 3), (0, 1, 2, 3)):
        plan = with_members(equal, lambda one: replace(one, precision="bf16") if one.lead in plain else one)  # noqa: B023
        members = {member.lead: member for member in recut(plan, JOB, MIXED).members}
        assert {lead for lead, member in members.items() if member.precision} == set(plain)
        shares.append(members[0].tokens + members[1].tokens)
    # H100s in bf16 take fewer tokens than in fp8.
    assert 8192 // 2 < shares[1] < shares[0]


SMALL = replace(presets()["qwen3-30b-a3b"], layers=2)


@pytest.mark.parametrize(
    ("model", "nodes", "plain"),
    [
        (SMALL, [("h", H100, 2)], (H100,)),
        (SMALL, [("h", H100, 1), ("b", B200, 1)], (B200,)),  # the H100 is left out
        (MODEL, [("h", H100, 2)], ()),
    ],
)
def test_gpus_compute_in_bf16_where_a_plan_is_faster_so(model, nodes, plain):
    job, machines = replace(JOB, model=model, global_batch_size=4, seq_length=4096), cluster(nodes)
    request = Request(job)
    chosen = find_plan(request, machines)
    forced = find_plan(replace(request, fp8_everywhere=True), machines)
    members = [member.precision for member in chosen.plan.members]
    assert members == ["bf16" if plain else None] * len(members)
    assert [member.precision for member in forced.plan.members] == [None] * len(forced.plan.members)
    why = [note for note in chosen.notes if "in bf16, as with fp8 by tensorwise scales" in note]
    longer = f"a plan takes {forced.cost.iteration_s / chosen.cost.iteration_s - 1:.1%} longer"
    assert [note.partition(":")[0] for note in why] == ([", ".join(plain)] if plain else [])
    assert all(longer in note for note in why)
    # A job in fp8 all the same, which scripts with Megatron's flags for it train.
    assert chosen.job.precision == "fp8"
    usual = find_plan(replace(request, job=job.in_bf16), machines)
    if plain:
        assert chosen.cost.iteration_s == usual.cost.iteration_s < forced.cost.iteration_s
    else:
        assert chosen.cost.iteration_s == forced.cost.iteration_s < usual.cost.iteration_s
    assert chosen.bound.iteration_s <= usual.bound.iteration_s


@pytest.mark.parametrize(
    ("tokens", "step", "dealt"),
    [
        ((100, 60), 16, (96, 64)),
        ((100, 70), 16, (96 + 10, 64)),
        ((96, 64), 16, (96, 64)),
        ((10, 5), 16, (10, 5)),
        ((100, 60), 1, (100, 60)),
    ],
)
def test_tokens_in_steps(tokens, step, dealt):
    layout = Layout((A2AGroup((0, 1), tokens, (2, 2)),), 1)
    assert layout.in_steps(step).parts[0].tokens == dealt


@pytest.mark.parametrize(
    ("nodes", "everywhere", "said"),
    [
        (
            [("a", A100, 2)],
            False,
            "--precision fp8: no rate of A100-SXM-80GB in fp8 by tensorwise scales is known",
        ),
        (
            [("h", H100, 2), ("a", A100, 2)],
            True,
            "--fp8-everywhere: no rate of A100-SXM-80GB .*leave these nodes",
        ),
    ],
)
def test_gpus_without_fp8_are_refused(nodes, everywhere, said):
    with pytest.raises(HexiError, match=said):
        find_plan(Request(JOB, fp8_everywhere=everywhere), cluster(nodes))


def test_mxfp8_is_of_blackwell_alone():
    known = cluster([("h", H100, 2), ("b", B200, 2)])
    request = Request(replace(JOB, fp8_recipe="mxfp8"), frozenset({"data_parallel"}), context_parallel=4)
    plan = find_plan(request, known).plan
    assert [m.precision for m in sorted(plan.members, key=lambda m: m.lead)] == ["bf16"] * 2 + [None] * 2
    assert all(member.tokens % 32 == 0 for member in plan.members)
