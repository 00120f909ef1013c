"""Plans whose stages differ, on any machines: the cost model, the simulator and commands agree."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cli import main as cli
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.lab.simulator import chrome_trace, simulate
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import (
    Domain,
    Group,
    JobTerms,
    Member,
    proportional_plan,
    read_plan,
    write_plan,
)
from tests.support.costs import cluster, tiny_job
from tests.support.plans import examples
from tests.support.written_stages import DEEP, FAST, plan_of, whole, written_out


@st.composite
def stage_plans(draw):
    """A job and a plan of one or two replicas, each of one to three stages of one or two units."""
    job = tiny_job(
        model=DEEP,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        overlap_gradients=draw(st.booleans()),
        micro_batch_size=2,
        global_batch_size=2,
    )
    rank, replicas, taken = 0, [], 0
    for _ in range(draw(st.integers(1, 2))):
        cuts = sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
        stages = []
        for layers in zip([0, *cuts], [*cuts, 4], strict=True):
            kind = draw(st.sampled_from(["one", "wide", "samples", "group"]))
            sizes = {"one": [1], "wide": [2], "samples": [1, 1], "group": [1, 1]}[kind]
            units = []
            for size in sizes:
                units.append(tuple(range(rank, rank + size)))
                rank += size
            if kind == "group":
                tokens = draw(st.integers(500, 3500))
                heads = draw(st.integers(1, 3))
                members = (Member(units[0], tokens, (0, heads)), Member(units[1], 4096 - tokens, (heads, 4)))
                domains = [Domain((Group(((0, 4096),), members),))]
            else:
                samples = 1 if kind == "samples" else None
                state = draw(st.integers(1, 3))
                domains = [whole(*unit, samples=samples, state=state) for unit in units]
            stages.append((layers, domains, draw(st.sampled_from([None, "none", "full", 1]))))
        count = draw(st.integers(1, 6))
        taken += count
        replicas.append((count, stages))
    batch = 2 * taken
    job = dataclasses.replace(job, data_parallel=len(replicas), global_batch_size=batch)
    terms = JobTerms(micro_batch_size=2, global_batch_size=batch)
    return job, plan_of(job, *replicas, terms=terms)


def machines(plan, bandwidth=10.0, gpu="PLAIN", per="gpu"):
    """Wide units need a node; all are on one, or each rank on its own where none is wide."""
    wide = any(len(member.ranks) > 1 for member in plan.members)
    nodes = [("a", gpu, plan.ranks)] if wide else [(f"n{n}", gpu, 1) for n in range(plan.ranks)]
    return cluster(nodes, bandwidth, per=per)


@given(stage_plans(), st.floats(1, 50), st.floats(1, 20))
@examples(60)
def test_more_bandwidth_and_faster_gpus_are_never_slower(case, bandwidth, factor):
    job, plan = case
    slow = estimate(plan, job, machines(plan, bandwidth))
    assert estimate(plan, job, machines(plan, bandwidth * factor)).iteration_s <= slow.iteration_s * (
        1 + 1e-9
    )
    assert estimate(plan, job, machines(plan, bandwidth, "DOUBLE")).iteration_s <= slow.iteration_s * (
        1 + 1e-9
    )
    assert slow.phases.total == pytest.approx(slow.iteration_s)
    assert slow.tokens_per_s <= slow.ceiling_tokens_per_s
    for rank in slow.ranks:
        assert rank.compute_s + rank.communication_s <= slow.iteration_s * (1 + 1e-9)


@given(stage_plans())
@examples(40)
def test_the_simulator_agrees(case):
    job, plan = case
    job, known = dataclasses.replace(job, overlap_gradients=False), machines(plan)
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    # Only stages that are not all waited for make a difference, and small ones.
    assert found.iteration_s - found.phases.bubble - found.phases.pipeline == pytest.approx(
        cost.iteration_s - cost.phases.bubble - cost.phases.pipeline, rel=0.02
    )
    assert 0.7 * cost.iteration_s <= found.iteration_s <= cost.iteration_s * (1 + 1e-9)
    assert found.phases.gradients == pytest.approx(cost.phases.gradients)
    for rank, model in zip(found.ranks, cost.ranks, strict=True):
        assert (rank.rank, rank.name, rank.stage, rank.unit) == (
            model.rank,
            model.name,
            model.stage,
            model.unit,
        )
        assert rank.busy_s == pytest.approx(model.compute_s)
        assert rank.busy_s + rank.communication_s + rank.idle_s == pytest.approx(found.iteration_s)


def test_the_trace_shows_every_micro_batch_in_its_stage():
    job = tiny_job(model=DEEP, data_parallel=2, global_batch_size=5)
    plan = plan_of(job, (3, [((0, 3), [whole(0)]), ((3, 4), [whole(1)])]), (2, [((0, 4), [whole(2)])]))
    found = simulate(plan, job, cluster([("a", "PLAIN", 3)]))
    assert list(map(len, found.pipeline)) == [2 * 3 * 2, 2 * 2]
    assert (found.layers, found.stage_layers) == (3, 4)
    events = [event for event in chrome_trace(found)["traceEvents"] if event.get("cat") == "pipeline"]
    # The second replica has no pipeline to show.
    assert {event["pid"] for event in events} == {3}
    assert sorted((event["tid"], event["name"]) for event in events) == sorted(
        (stage, f"{way} {number}")
        for stage in (0, 1)
        for way in ("forward", "backward")
        for number in range(3)
    )


def test_commands_take_the_job_from_the_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    job = Job(presets()["gpt-7b"], 4096, global_batch_size=4)
    terms = JobTerms(micro_batch_size=2, global_batch_size=4, recompute="full", precision="bf16")
    stages = [((0, 20), [whole(0, heads=32)]), ((20, 32), [whole(1, samples=2, heads=32)])]
    path, machines_path = tmp_path / "plan.yaml", tmp_path / "cluster.yaml"
    write_plan(plan_of(job, (2, stages), terms=terms), path)
    machines_path.write_text(
        "name: two\nnodes:\n- {name: a, gpu: H200-SXM-141GB, gpus: 2}\n"
        "network: {bandwidth_gb_s: 25, latency_us: 5, per: gpu}\n"
    )
    asked = [str(path), "--cluster", str(machines_path), "--model", "gpt-7b", "--json"]
    found = {}
    for name in ("validate", "simulate"):
        monkeypatch.setattr("sys.argv", ["hexi", name, *asked])
        with pytest.raises(SystemExit) as done:
            cli.main()
        assert done.value.code in (0, None), capsys.readouterr().err
        found[name] = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["hexi", "validate", *asked, "--recompute-granularity", "none"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert (
        "job.recompute is full, the command line has --recompute-granularity none" in capsys.readouterr().err
    )
    whole_job = dataclasses.replace(job, micro_batch_size=2, recompute="full")
    expected = estimate(read_plan(path), whole_job, read_cluster(machines_path))
    assert found["validate"]["estimate"]["iteration_s"] == pytest.approx(expected.iteration_s)
    assert found["simulate"]["model_iteration_s"] == pytest.approx(expected.iteration_s)
    assert found["simulate"]["stage_layers"] == 20


def test_plans_of_one_model_may_have_units_of_other_sizes_on_the_same_ranks():
    known = cluster([("a", "PLAIN", 4)], FAST)
    job = tiny_job(model=DEEP, global_batch_size=4)
    plans = []
    for width in (1, 2, 4):
        cut = dataclasses.replace(job, tensor_parallel=width)
        plan = proportional_plan(cut.workload(), [[[1.0] * (4 // width)]])
        plans.append(written_out(plan, cut))
    model = CostModel(job, known)
    together = [model.timing(plan).phases.total for plan in plans]
    assert together == [CostModel(job, known).timing(plan).phases.total for plan in plans]
    assert len(set(together)) == 3
