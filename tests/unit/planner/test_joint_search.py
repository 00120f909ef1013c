"""The joint search: its plans are valid, fit and are near the best that small fleets allow."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from megatron_hexi.cost import CostModel, attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    plan_digest,
    read_plan,
    validate_plan,
    write_plan,
)
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.planner.joint import JointSearches
from megatron_hexi.planner.request import Request
from tests.support.brute import partitions
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.fleets import random_parallel_case, read_text, reproduce

DEEP = dataclasses.replace(TINY, layers=4)


def search(request, known):
    """The best plan that fits of all micro-batch sizes, without baselines; ``None``: none."""
    found = JointSearches(lambda *_: None).plans(request, known, 1.0)
    return min(found, key=lambda candidate: candidate.order, default=None)


# Whole plans


@pytest.fixture(
    scope="module", params=[range(6), pytest.param(range(6, 32), marks=pytest.mark.slow)], ids=["few", "more"]
)
def plans(request):
    """(text, cluster, request, plan) of random fleets; ``None`` where nothing is found."""
    found = []
    for seed in request.param:
        text, known, job = random_parallel_case(seed, gpus=(2, 3, 4, 6, 8))
        asked = Request(job)
        found.append((text, known, asked, search(asked, known)))
    return found


def test_every_plan_is_valid_and_fits(plans, tmp_path):
    checked = 0
    for text, known, request, found in plans:
        if found is None:
            continue
        validate_plan(found.plan)
        write_plan(found.plan, tmp_path / "plan.yaml")
        assert read_plan(tmp_path / "plan.yaml") == found.plan
        cost = CostModel(found.job, known).estimate(found.plan)
        assert cost.fits, reproduce(text, request)
        assert cost.iteration_s == pytest.approx(found.iteration_s)
        batch = sum(replica.micro_batches for replica in found.plan.replicas)
        assert batch * found.job.micro_batch_size == request.job.global_batch_size
        assert len(found.plan.replicas) == found.job.data_parallel
        checked += 1
    assert checked > 0.7 * len(plans)


def test_it_is_hardly_ever_slower_than_the_best_baseline(plans):
    parts = []
    for text, known, request, found in plans:
        trials = [one.trial for one in find_baselines(request, known)[0] if one.trial is not None]
        if trials and found is not None:
            part = found.iteration_s / min(trial.iteration_s for trial in trials)
            assert part < 1.05, reproduce(text, request)
            parts.append(part)
    assert sum(part > 1 + 1e-6 for part in parts) <= 2
    assert np.mean(np.array(parts) < 0.98) > 0.3


# All plans of few GPUs, by their own reckoning


class Exhaustive:
    """The best of one replica with equal micro-batches, each stage some GPUs of the fleet.

    Tried are all partitions of all GPUs into stages, in every order, with all numbers of layers,
    tensor-parallel sizes and recomputation; in a stage tokens and heads go by speed, in one group or in one
    for each unit. GPUs of a node are exchanged freely.

    Args:
        job: what is planned.
        known: where.
    """

    def __init__(self, job, known):
        self._job, self._known = job, known
        self._model = CostModel(job, known)
        self._nodes = [rank.node for rank in known.ranks]
        speeds = [device_speeds(rank.device, job) for rank in known.ranks]
        self._speeds = [
            1 / (token_seconds(one, job) + attention_seconds(one, job, causal=True)) for one in speeds
        ]
        self.timed = 0

    def run(self, known_s=math.inf):
        """(seconds, plan) of the best that fits and is faster than what is known.

        Those that take longer at their GPUs' best rates than the best so far are not timed.
        """
        best = known_s, None
        cuts = ((stages, layers) for stages in self._partitions() for layers in self._layers(len(stages)))
        for least, stages, layers in sorted(
            ((self._least_s(*cut), *cut) for cut in cuts), key=lambda one: one[0]
        ):
            if least > best[0]:
                break
            for cut in itertools.product(*map(self._ways, stages)):
                for again in ("none", "full"):
                    plan = self._plan(stages, layers, cut, again)
                    timing = self._model.timing(plan)
                    self.timed += 1
                    if timing.fits and timing.phases.total < best[0]:
                        best = timing.phases.total, plan
        return best

    def _least_s(self, stages, layers):
        """Seconds at the best rates, of computing alone."""
        parts = [(stop - first) / self._job.model.layers for first, stop in layers]
        times = [
            part * self._job.seq_length / sum(self._speeds[gpu] for gpu in stage)
            for part, stage in zip(parts, stages, strict=True)
        ]
        return 0.999 * (sum(times) + (self._job.global_batch_size - 1) * max(times))

    def _partitions(self):
        seen = set()
        for chosen in partitions(list(range(len(self._nodes)))):
            for stages in itertools.permutations(chosen):
                name = tuple(tuple(self._nodes[gpu] for gpu in sorted(stage)) for stage in stages)
                if name not in seen and len(stages) <= self._job.model.layers:
                    seen.add(name)
                    yield [sorted(stage) for stage in stages]

    def _layers(self, stages):
        for ends in itertools.combinations(range(1, self._job.model.layers), stages - 1):
            yield list(itertools.pairwise((0, *ends, self._job.model.layers)))

    def _ways(self, stage):
        """(tensor-parallel size, one group or several)."""
        for width in (1, 2, 4):
            runs = [stage[first : first + width] for first in range(0, len(stage), width)]
            alike = all(len(run) == width and len({self._nodes[gpu] for gpu in run}) == 1 for run in runs)
            if alike and self._job.model.heads % width == 0:
                yield from ((width, together) for together in {True, len(runs) == 1})

    def _plan(self, stages, layers, cut, again):
        order = [gpu for stage in stages for gpu in stage]
        rank = {gpu: number for number, gpu in enumerate(order)}
        built = tuple(
            Stage((self._domain(stage, rank, *way),), layers=own, recompute=again)
            for stage, own, way in zip(stages, layers, cut, strict=True)
        )
        widths = {width for width, _ in cut}
        workload = dataclasses.replace(
            self._job.workload(), tensor_parallel=widths.pop() if len(widths) == 1 else 0
        )
        return Plan(workload, (Replica(built, self._job.global_batch_size),), gpus=tuple(order))

    def _domain(self, stage, rank, width, together):
        job = self._job
        units = [stage[first : first + width] for first in range(0, len(stage), width)]
        speeds = [self._speeds[unit[0]] for unit in units]
        tokens, local = apportion(job.seq_length, speeds), job.model.heads // width
        heads = consecutive(apportion(local, speeds)) if together else [(0, local)] * len(units)
        members = [
            Member(tuple(rank[gpu] for gpu in unit), count, own)
            for unit, count, own in zip(units, tokens, heads, strict=True)
        ]
        if together:
            return Domain((Group(((0, job.seq_length),), tuple(members)),))
        segments = causal_segments(tokens)
        return Domain(tuple(Group(own, (member,)) for own, member in zip(segments, members, strict=True)))


FEW = [
    ([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], 10, {"seq_length": 2**15}),
    ([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], 0.5, {"seq_length": 2**13, "global_batch_size": 6}),
    ([("a", "DOUBLE, memory_gb: 3", 2), ("b", "PLAIN", 2)], 2, {"seq_length": 2**16}),
    ([("a", "H100-SXM-80GB", 2), ("b", "L40S-48GB", 2)], 25, {"seq_length": 2**16}),
]
#: On 4 + 4 GPUs: GPUs, GB/s between nodes, and the job.
EIGHT = [
    ("DOUBLE", "PLAIN, memory_gb: 2.6", 1, {"seq_length": 2**15}),
    ("DOUBLE", "PLAIN", 10, {"seq_length": 2**15}),
    ("DOUBLE", "PLAIN", 1, {"seq_length": 2**13}),
    ("DOUBLE", "PLAIN", 0.2, {"seq_length": 2**14, "global_batch_size": 8}),
    ("DOUBLE, memory_gb: 2.6", "PLAIN, memory_gb: 2.6", 1, {"seq_length": 2**14}),
    ("DOUBLE, memory_gb: 3", "PLAIN", 2, {"seq_length": 2**16}),
    ("H100-SXM-80GB", "L40S-48GB", 25, {"seq_length": 2**16}),
    ("H100-SXM-80GB", "A100-SXM-80GB", 5, {"seq_length": 2**14, "global_batch_size": 8}),
    ("A100-SXM-80GB", "RTX4090-24GB", 0.7, {"seq_length": 2**14}),
    ("H200-SXM-141GB", "H100-SXM-80GB", 25, {"seq_length": 2**17, "global_batch_size": 2}),
]


def lost_to_everything(nodes, bandwidth, changes):
    """How many times as long the plan takes as the best of all that are tried."""
    job = tiny_job(**{"model": DEEP, "global_batch_size": 4, **changes})
    known = cluster(nodes, bandwidth)
    found = search(Request(job), known)
    assert found is not None
    seconds, _ = Exhaustive(job, known).run(found.iteration_s)
    return found.iteration_s / seconds


@pytest.mark.parametrize(("nodes", "bandwidth", "changes"), FEW)
def test_it_is_as_good_as_trying_everything(nodes, bandwidth, changes):
    assert lost_to_everything(nodes, bandwidth, changes) <= 1.02


@pytest.mark.slow  # seconds to minutes each
@pytest.mark.parametrize(("first", "second", "bandwidth", "changes"), EIGHT)
def test_so_it_is_on_eight_gpus(first, second, bandwidth, changes):
    assert lost_to_everything([("a", first, 4), ("b", second, 4)], bandwidth, changes) <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "model", "length", "batch"),
    [
        ((("H100-SXM-80GB", 4), ("A100-SXM-40GB", 8)), "llama3-8b", 2**13, 8),
        ((("H100-SXM-80GB", 4), ("A100-SXM-40GB", 8)), "gpt-13b", 2**15, 8),
        ((("H100-SXM-80GB", 8), ("L40S-48GB", 8)), "gpt-7b", 2**14, 16),
    ],
)
def test_eight_times_the_gpus_and_the_batch_lose_nothing_to_eight_copies_of_the_plan(
    entries, model, length, batch
):
    known, jobs, planned = [], [], []
    for times in (1, 8):
        nodes = "".join(
            f"- {{name: n{place}, gpu: {gpu}, gpus: {size}, count: {times}}}\n"
            for place, (gpu, size) in enumerate(entries)
        )
        known.append(read_text(f"name: times\nnodes:\n{nodes}network: {{bandwidth_gb_s: 25, per: gpu}}\n"))
        jobs.append(Job(read_model(model), length, global_batch_size=times * batch))
        planned.append(find_plan(Request(jobs[-1]), known[-1]))
    small = planned[0]
    job = dataclasses.replace(
        small.job, global_batch_size=8 * batch, data_parallel=8 * len(small.plan.replicas)
    )
    copies = eight_copies(small.plan, [size for _, size in entries])
    seconds = CostModel(job, known[1]).timing(copies).phases.total
    assert planned[1].cost.iteration_s <= 1.02 * seconds


def eight_copies(plan, sizes):
    """A plan eight times, on eight nodes in place of each of these."""
    ranks = sum(len(member.ranks) for member in plan.members)
    firsts = np.cumsum([0, *sizes])
    replicas, gpus = [], []
    for copy in range(8):
        for gpu in plan.gpus or range(ranks):
            node = int(np.searchsorted(firsts, gpu, side="right")) - 1
            gpus.append(int(8 * firsts[node] + copy * sizes[node] + gpu - firsts[node]))
        replicas += [moved(replica, copy * ranks) for replica in plan.replicas]
    return dataclasses.replace(plan, replicas=tuple(replicas), gpus=tuple(gpus), estimate=None)


def moved(part, ranks):
    """A replica, or a part of one, on other ranks of the job."""
    if isinstance(part, Member):
        return dataclasses.replace(part, ranks=tuple(rank + ranks for rank in part.ranks))
    if isinstance(part, tuple):
        return tuple(moved(one, ranks) for one in part)
    for name in {"stages", "domains", "groups", "members"} & vars(part).keys():
        part = dataclasses.replace(part, **{name: moved(getattr(part, name), ranks)})
    return part


# What is fixed, and what decides nothing


@pytest.mark.parametrize(
    "terms",
    [
        {"tensor_parallel": 2},
        pytest.param({"pipeline_parallel": 1}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 4}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": 1}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": 3}, marks=pytest.mark.slow),
        pytest.param({"recompute": "none"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "full", "pipeline_parallel": 2}, marks=pytest.mark.slow),
        {"micro_batch_size": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, "recompute": "full"},
    ],
)
def test_what_is_fixed_is_kept(terms):
    job = tiny_job(model=DEEP, global_batch_size=12, **terms)
    known = cluster([("a", "DOUBLE", 4), ("b", "PLAIN", 4)])
    plans = JointSearches(lambda *_: None).plans(Request(job, frozenset(terms)), known, 1.0)
    assert plans
    for candidate in plans:
        stages = candidate.plan.stages
        modes = {candidate.job.recompute if stage.recompute is None else stage.recompute for stage in stages}
        made = {
            "tensor_parallel": {len(member.ranks) for member in candidate.plan.members},
            "pipeline_parallel": {len(replica.stages) for replica in candidate.plan.replicas},
            "data_parallel": {len(candidate.plan.replicas)},
            "recompute": modes,
            "micro_batch_size": {candidate.job.micro_batch_size},
        }
        assert {name: made[name] for name in terms} == {name: {value} for name, value in terms.items()}
    assert search(Request(job, frozenset(terms)), known) is not None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),  # of small fleets: test_determinism.py
    ],
)
def test_the_same_plan_again_and_whatever_the_file_lists_first(changes):
    job = tiny_job(model=DEEP, seq_length=2**14, global_batch_size=4, **changes)
    nodes = [("a", "DOUBLE", 2), ("b", "PLAIN", 2), ("c", "PLAIN", 4)]
    request = Request(job, frozenset(changes))
    plans = [search(request, cluster(order, 3)) for order in (nodes, nodes[::-1], nodes[1:] + nodes[:1])]
    again = search(request, cluster(nodes, 3))
    assert plan_digest(plans[0].plan) == plan_digest(again.plan)
    for found in plans:
        # Rings of gradients go by rank, and so by the file.
        seconds, expected = (
            one.iteration_s - one.timing.phases.by_name["gradients"] for one in (found, again)
        )
        assert seconds == pytest.approx(expected, rel=1e-9)
        assert [
            (len(replica.stages), replica.micro_batches, [stage.layers for stage in replica.stages])
            for replica in found.plan.replicas
        ] == [
            (len(replica.stages), replica.micro_batches, [stage.layers for stage in replica.stages])
            for replica in again.plan.replicas
        ]
