"""What is said of GPUs that a plan leaves out, and of those that bring little."""

from dataclasses import replace
from types import SimpleNamespace

from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.ablation import weak_kinds
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.notes import left_out
from megatron_hexi.report.comparison import weak_report
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import read_text

WEAK = """\
name: weak
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 4}
- {name: l40s, gpu: L40S-48GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""


def candidate(known, gpus):
    """A plan for some GPUs of a node."""
    planned = find_plan(Request(tiny_job()), cluster([("a", "PLAIN", len(gpus))]))
    plan = replace(planned.plan, gpus=tuple(gpus))
    return Candidate(plan, planned.job, CostModel(planned.job, known).timing(plan))


def test_left_out_gpus_are_named_with_what_was_tried():
    known = cluster([("a", "PLAIN", 4)])
    few, more = candidate(known, [0]), candidate(known, [0, 1])
    (note,) = left_out(few, known, [few, more])
    less = 1 - more.iteration_s / few.iteration_s
    assert note == (
        "3 of 4 GPUs left out (a-0/1, a-0/2, a-0/3): the fastest plan with more GPUs that was tried takes "
        f"{less:.1%} less time"
    )
    (note,) = left_out(more, known, [few, more])
    assert note.endswith("no plan with them was among those that were timed and fit")
    slow = replace(more, timing=SimpleNamespace(phases=SimpleNamespace(total=1.5 * few.iteration_s)))
    (note,) = left_out(few, known, [slow])
    assert note.endswith("the fastest plan with more GPUs that was tried takes 50.0% longer")
    whole = candidate(known, [0, 1, 2, 3])
    assert left_out(whole, known, [few, more]) == ()


def test_gpus_that_bring_little_are_named():
    known, request = read_text(WEAK), Request(Job(read_model("gpt-3b"), 32768, global_batch_size=64))
    planned = find_plan(request, known)
    alone = find_plan(request, known.without([1]))
    assert planned.cost.iteration_s <= alone.cost.iteration_s * (1 + 1e-9)
    (kind,) = weak_kinds(request, known, planned.plan)
    assert (kind.name, kind.gpus, kind.tokens_per_s_without) == ("L40S-48GB", 1, alone.cost.tokens_per_s)
    brings = alone.cost.iteration_s / planned.cost.iteration_s - 1
    assert 0 < brings < 0.06
    (line,) = weak_report(planned, [kind]).renderables
    assert str(line) == (
        f"the 1 L40S-48GB bring {brings:.1%}: without them {alone.cost.tokens_per_s:,.0f} tokens/s"
    )


def test_a_cluster_of_one_kind_has_no_weak_one():
    known = cluster([("a", "PLAIN", 2)])
    assert weak_kinds(Request(tiny_job()), known, candidate(known, [0, 1]).plan) == ()
