"""Whole plans: valid, inside memory, never slower than a baseline; and advice where none fits."""

import functools
import itertools
import re
from dataclasses import replace
from random import Random

import pytest

from megatron_hexi.cluster import cluster_digest
from megatron_hexi.cost import estimate
from megatron_hexi.errors import ClusterError, HexiError, NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import read_plan, validate_plan, write_plan
from megatron_hexi.planner import CHOSEN, Request, find_plan, planner
from megatron_hexi.planner.advice import nothing_fits
from megatron_hexi.planner.bound import memory_fits
from megatron_hexi.planner.joint import JointSearches
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_case, random_parallel_case, read_text, reproduce

#: Of random clusters: in CI, and more on request.
SEEDS = [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)]


def request_of(job, known, seed):
    """The job with some of its terms fixed, or none."""
    random = Random(seed)
    units = len(known.ranks) // (job.tensor_parallel * job.pipeline_parallel)
    batch = job.global_batch_size // job.micro_batch_size
    job = replace(job, data_parallel=random.randint(1, max(1, min(units, batch, 2))))
    return Request(job, frozenset(random.sample(CHOSEN, random.choice([0, 0, 1, 2, len(CHOSEN)]))))


@pytest.fixture(scope="module", params=SEEDS, ids=["few", "more"])
def plans(request):
    """(text, cluster, what planning gave, request) of each random cluster that a plan fits on."""
    found = []
    for seed in request.param:
        text, known, job = random_parallel_case(seed, gpus=(2, 3, 3, 6))
        asked = request_of(job, known, seed)
        try:
            planned = find_plan(asked, known, with_baselines=True)
        except (ClusterError, NothingFitsError):
            continue
        found.append((text, known, planned, asked))
    assert len(found) > 0.6 * len(request.param)
    return found


def test_no_baseline_is_faster(plans):
    timed = 0
    for text, _, planned, request in plans:
        for baseline in planned.baselines:
            if baseline.trial is not None:
                part = planned.cost.iteration_s / baseline.trial.iteration_s
                assert part <= 1 + 1e-9, f"{baseline.name} {part} {reproduce(text, request)}"
                assert baseline.trial.fits
                timed += 1
    assert timed > len(plans)


def test_every_plan_is_valid_and_inside_memory(plans):
    for _, known, planned, _ in plans:
        validate_plan(planned.plan)
        assert planned.cost.fits
        cost = estimate(planned.plan, planned.job, known)
        assert cost.iteration_s == planned.cost.iteration_s
        assert all(rank.memory_gib <= rank.usable_gib for rank in cost.ranks)


def test_every_field_of_the_estimate_is_filled(plans):
    for text, known, planned, request in plans:
        plan, told = planned.plan, planned.plan.estimate
        assert told.iteration_s == planned.cost.iteration_s > 0
        assert told.tokens_per_s == pytest.approx(
            planned.job.global_batch_size * planned.job.seq_length / told.iteration_s
        )
        assert 0 < told.lower_bound_s <= told.iteration_s, reproduce(text, request)
        assert told.gap == pytest.approx(told.iteration_s / told.lower_bound_s - 1)
        gpus = known.ranks if plan.gpus is None else plan.gpus
        assert len(told.memory_gib) == len(gpus)
        named = {baseline.name for baseline in planned.baselines if baseline.trial is not None}
        assert set(told.against or {}) == named
        made = plan.provenance
        assert made.cluster_digest == cluster_digest(known)
        assert (made.cluster, made.model) == (known.name, planned.job.model.name)
        assert made.planner.startswith("megatron-hexi ")
        assert made.solver.startswith("OR-Tools CP-SAT ")
        assert made.created is None  # the same input gives the same bytes
        assert planned.planning_s > 0
        assert planned.trials > 0


def test_a_plan_s_file_says_it_all(plans, tmp_path):
    for _, _, planned, _ in plans[:10]:
        write_plan(planned.plan, tmp_path / "plan.yaml")
        assert read_plan(tmp_path / "plan.yaml") == planned.plan


def test_the_micro_batches_are_those_of_an_iteration(plans):
    for _, _, planned, _ in plans:
        shares = [replica.micro_batches for replica in planned.plan.replicas]
        assert sum(shares) == planned.job.global_batch_size // planned.job.micro_batch_size
        assert planned.job.data_parallel == len(shares)


def test_what_is_fixed_is_kept(plans):
    kept = set()
    for text, _, planned, request in plans:
        plan, job, case = planned.plan, request.job, reproduce(text, request)
        stages = plan.stages
        # A plan for Megatron's own pipelines and recomputation leaves both to the job.
        again = {planned.job.recompute if stage.recompute is None else stage.recompute for stage in stages}
        made = {
            "tensor_parallel": {len(member.ranks) for stage in stages for member in stage.members},
            "pipeline_parallel": {
                len(replica.stages) * planned.job.pipeline_parallel for replica in plan.replicas
            },
            "data_parallel": {len(plan.replicas)},
            "micro_batch_size": {planned.job.micro_batch_size},
            "recompute": again,
        }
        for name in request.fixed:
            assert made[name] == {getattr(job, name)}, case
        kept |= request.fixed
    assert kept == set(CHOSEN)


def test_baselines_that_are_not_asked_for_are_not_told():
    _, known, job = random_parallel_case(2, gpus=(2,))
    one, other = (find_plan(Request(job), known, with_baselines=asked) for asked in (True, False))
    assert one.baselines
    assert not other.baselines
    assert one.cost.iteration_s <= other.cost.iteration_s


# By hand.


def test_one_gpu_does_everything():
    planned = find_plan(Request(tiny_job()), cluster([("a", "PLAIN", 1)]))
    (group,) = planned.plan.replicas[0].domain.groups
    (member,) = group.members
    assert (member.tokens, member.heads) == (4096, (0, 4))
    assert planned.plan.gpus is None
    assert planned.notes == ()


def test_equal_gpus_get_equal_work():
    planned = find_plan(Request(tiny_job(seq_length=2**16)), cluster([("a", "PLAIN", 4)]))
    members = planned.plan.replicas[0].domain.members
    assert len({(member.tokens, member.heads[1] - member.heads[0], member.state) for member in members}) == 1
    assert planned.gap < 0.05


def test_a_gpu_twice_as_fast_gets_about_twice_the_work():
    planned = find_plan(
        Request(tiny_job(seq_length=2**17)),
        cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)], bandwidth=1e5),
    )
    slow, fast = planned.plan.replicas[0].domain.members
    work = [member.tokens * (member.heads[1] - member.heads[0]) for member in (slow, fast)]
    assert 1.7 < work[1] / work[0] < 4
    assert planned.gap < 0.032  # the bound leaves out the optimizer's step on a rank's shard


def test_gpus_that_would_only_cost_time_are_left_out_and_said():
    planned = find_plan(
        Request(tiny_job()), cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 1)], bandwidth=1e-3, latency=1e4)
    )
    assert planned.plan.gpus is not None
    assert set(planned.plan.gpus) <= {0, 1}
    assert any("left out" in note for note in planned.notes)


#: Two kinds of nodes; NETWORK, and what each node says of its cards, are filled in.
CARDS = """\
name: cards
nodes:
- {name: fast, count: 2, gpu: H100-SXM-80GB, gpus: 2OWN}
- {name: slow, gpu: A100-SXM-80GB, gpus: 2OWN}
"""


@pytest.mark.parametrize(("per", "cards"), [("gpu", 2), ("node", 1)])
def test_cards_at_each_node_are_planned_as_one_network_that_says_the_same(per, cards):
    common = CARDS.replace("OWN", "") + f"network: {{bandwidth_gb_s: 12.5, per: {per}}}\n"
    own = CARDS.replace("OWN", f", network: {{cards: {cards}, gbit_s: 100}}")
    job = Job(model=read_model("gpt-3b"), seq_length=32768, global_batch_size=8)
    first, second = (find_plan(Request(job), read_text(text)) for text in (common, own))
    assert replace(first.plan, provenance=None) == replace(second.plan, provenance=None)
    assert first.cost.iteration_s == second.cost.iteration_s


def test_thinner_cards_cost_time():
    """Half of a node's GPUs on each of two cards, or all on one that is slow."""
    wide, thin = (
        find_plan(
            Request(tiny_job(seq_length=2**16)), read_text(CARDS.replace("OWN", f", network: {{{cards}}}"))
        )
        for cards in ("cards: 2, gbit_s: 400", "cards: 1, gbit_s: 1")
    )
    assert wide.cost.iteration_s < thin.cost.iteration_s


def test_gpus_that_make_no_unit_are_named():
    request = Request(tiny_job(tensor_parallel=2), frozenset(["tensor_parallel"]))
    planned = find_plan(request, cluster([("a", "PLAIN", 3)]))
    assert planned.plan.gpus == (0, 1)
    assert any("a-0/2" in note for note in planned.notes)


def test_progress_is_told():
    told = []
    find_plan(
        Request(tiny_job(global_batch_size=2)),
        cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)]),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert len(told) > 3
    assert all(0 <= done < total for _, done, total in told)


def test_what_is_free_is_as_jobs_have_it_by_default():
    request = Request(tiny_job(recompute="full", data_parallel=2), frozenset(["recompute"]))
    assert request == Request(tiny_job(recompute="full"), frozenset(["recompute"]))
    with pytest.raises(HexiError, match="heads cannot be fixed; name some of tensor_parallel"):
        Request(tiny_job(), frozenset(["heads"]))


@pytest.mark.parametrize(
    ("terms", "fixed", "words"),
    [
        (
            {"data_parallel": 5},
            (),
            r"--data-parallel-size 5: .* 2 micro-batches .*; give 2 or fewer",
        ),
        ({"data_parallel": 3, "tensor_parallel": 2}, ("tensor_parallel",), r"for 2 replicas of 2 or more"),
        ({"data_parallel": 3}, (), r"an iteration has 2 micro-batches .*; give 2 or fewer, or auto"),
        (
            {"data_parallel": 2, "micro_batch_size": 2},
            ("micro_batch_size",),
            r"an iteration has 1 micro-batches \(global batch 2 / micro-batch 2\)",
        ),
        ({"tensor_parallel": 4}, ("tensor_parallel",), "--tensor-model-parallel-size 4: .* 0 groups of GPUs"),
    ],
)
def test_numbers_that_no_layout_has_are_refused(terms, fixed, words):
    request = Request(tiny_job(global_batch_size=2, **terms), frozenset([*terms, *fixed]))
    with pytest.raises(HexiError, match=words):
        find_plan(request, cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)]))


# Where nothing fits.


@functools.cache
def too_large(count):
    """The first of them, found once."""
    return list(itertools.islice(all_too_large(), count))


def all_too_large():
    """Requests that have no plan, some with terms that need not be so, and what is said of them."""
    for seed in range(200):
        _, known, job = random_case(seed, lengths=(2**17, 2**18), gpus=(1, 2, 3))
        request = Request(job, frozenset(["recompute"] if job.recompute == "none" else []))
        try:
            find_plan(request, known)
        except NothingFitsError as error:
            yield known, request, str(error)


def test_nodes_whose_gpus_differ_are_refused_by_name():
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
    with pytest.raises(ClusterError, match=r"^node b-0 of cluster test: b-0/1 .*give all of them the speed"):
        find_plan(Request(tiny_job()), known.at_speeds({3: 0.5}))
    assert find_plan(Request(tiny_job()), known.at_speeds({2: 0.5, 3: 0.5})).cost.fits


@pytest.mark.parametrize(("nodes", "most"), [(1, 6), (128, 2)])
def test_no_more_requests_are_tried_than_are_worth_it(nodes, most):
    known = cluster([("a", "PLAIN", 8)]).with_nodes("a", nodes)
    request = Request(tiny_job(global_batch_size=2**40, precision="fp32", distributed_optimizer=False))
    tried = []
    error = nothing_fits(request, known, lambda *what: tried.append(what), proven=False)
    assert len(tried) == error.details["tried"] == most
    assert f"{most} other requests planned, no more were tried" in str(error)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_would_fit_does_fit(count):
    proposed = 0
    for known, request, text in too_large(count):
        assert "\n" not in text
        assert f"on cluster {known.name} at {request.job.seq_length} tokens" in text
        assert ("with --recompute-granularity none" in text) == bool(request.fixed)
        for change in re.findall(r"(?:fits:|; or) (.+?) \(about", text):
            planned = find_plan(*changed(request, known, change))
            assert planned.cost.fits, change
            proposed += 1
    assert proposed > count / 2


def changed(request, known, change):
    """What a proposal says, done as its reader would."""
    job, fixed = request.job, request.fixed
    for part in change.split(" and "):
        if part.startswith("leave out --recompute-granularity "):
            fixed = fixed - {"recompute"}
        elif count := re.fullmatch(r"nodes (\S+) with count: (\d+) in the cluster file", part):
            known = known.with_nodes(count[1], int(count[2]))
        elif part == "--use-distributed-optimizer":
            job = replace(job, distributed_optimizer=True)
        elif part == "--precision bf16":
            job = replace(job, precision="bf16")
        else:
            term = re.fullmatch(r"--(seq-length|global-batch-size) (\d+)", part)
            assert term, part
            job = replace(job, **{term[1].replace("-", "_"): int(term[2])})
    return Request(job, fixed, request.memory_margin), known


SMALL = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: a100, gpu: A100-SXM-40GB, gpus: 2}
network: {bandwidth_gb_s: 25}
"""


@pytest.mark.parametrize(
    ("model", "sequence", "terms", "proven", "change"),
    [
        pytest.param("gpt-3b", 2**21, {}, True, "--seq-length", marks=pytest.mark.slow),
        pytest.param(
            "gpt-13b",
            2**17,
            {"tensor_parallel": 1, "recompute": "none"},
            False,
            "leave out --recompute-granularity none",
            marks=pytest.mark.slow,  # of small fleets: `test_what_would_fit_does_fit`
        ),
    ],
)
def test_the_change_that_helps_is_proposed(model, sequence, terms, proven, change):
    known = read_text(SMALL)
    job = Job(model=read_model(model), seq_length=sequence, global_batch_size=4, **terms)
    request = Request(job, frozenset(terms))
    with pytest.raises(NothingFitsError) as caught:
        find_plan(request, known)
    details = caught.value.details
    assert details["proven"] == proven == (not memory_fits(request, known))
    assert str(caught.value).startswith("no plan fits" if proven else "no plan was found that fits")
    assert details["fits"][0]["change"].startswith(change)
    assert len(details["fits"]) <= details["tried"]
    for one in details["fits"]:
        assert find_plan(*changed(request, known, one["change"])).cost.fits, one
        assert one["change"] in str(caught.value)


def test_that_nothing_fits_is_said_only_where_it_is_certain(monkeypatch):
    for known, request, text in too_large(3):
        certain = not memory_fits(request, known)
        assert text.startswith("no plan fits" if certain else "no plan was found that fits")
    monkeypatch.setattr(JointSearches, "plans", lambda *_: [])
    monkeypatch.setattr(JointSearches, "with_few_replicas", lambda *_: None)
    monkeypatch.setattr(planner, "find_faster", lambda *_, **__: (None, 0))
    with pytest.raises(NothingFitsError, match=r"^no plan was found that fits on cluster test at 4096 "):
        find_plan(Request(tiny_job()), cluster([("a", "PLAIN", 1)]))


@pytest.mark.parametrize("seed", [1, 21])
def test_where_a_baseline_fits_there_is_a_plan(seed):
    # The search passes over GPUs that are slow, and over groupings that are.
    _, known, job = random_parallel_case(seed, gpus=(2, 3, 4, 6, 8))
    assert not find_plan(Request(job), known).baselines


@pytest.mark.parametrize(
    "replicas", [None, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))]
)
def test_a_sequence_that_all_memory_is_too_small_for_is_refused(replicas):
    known = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    job = tiny_job(seq_length=2**28, global_batch_size=4, data_parallel=replicas or 1)
    with pytest.raises(NothingFitsError, match=r"^no plan fits .*fits: .*--seq-length \d"):
        find_plan(Request(job, frozenset(["data_parallel"] if replicas else [])), known)
