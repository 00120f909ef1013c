"""The plan for the nodes that are there, and the checkpoint that a round goes on from."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.elastic.planning import __main__ as planning
from megatron_hexi.elastic.planning import node
from megatron_hexi.elastic.planning.survivors import COMMAND_LINE, survive
from megatron_hexi.elastic.training.loading import TRACKER
from megatron_hexi.elastic.training.round import newest_checkpoint
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.models import Job
from megatron_hexi.models.job import job_of_plan
from megatron_hexi.models.megatron_arguments import model_from_arguments
from megatron_hexi.plan import JobTerms
from megatron_hexi.planner import CHOSEN, Request, find_plan, plan_of_whole
from megatron_hexi.shell.words import unplaced
from megatron_hexi.text_file import read_text
from tests.support.shell import is_one_error_line

UNGROUPED = [
    *("--num-layers", "2", "--hidden-size", "96", "--num-attention-heads", "6", "--swiglu"),
    *("--seq-length", "1024"),
    *("--position-embedding-type", "rope", "--max-position-embeddings", "1024", "--vocab-size", "255"),
    *("--micro-batch-size", "1", "--global-batch-size", "4"),
]
WORDS = [*UNGROUPED, "--group-query-attention", "--num-query-groups", "2"]
EXPERTS = [
    *("--num-experts", "8", "--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "64"),
    *("--moe-router-topk", "2", "--disable-bias-linear"),
]
NETWORKS = {
    "network": "network: {bandwidth_gb_s: 0.125, latency_us: 20, per: node}",
    "levels": "network: {bandwidth_gb_s: 0.5, latency_us: 20, per: node}\n"
    "levels: [{name: rack, groups: [[fast], [slow]], bandwidth_gb_s: 0.1, latency_us: 50}]",
    "matrix": "matrix:\n  nodes: [fast-0, fast-1, slow-0]\n"
    "  bandwidth_gb_s: [[null, 0.5, 0.1], [0.4, null, 0.2], [0.1, 0.3, null]]\n"
    "  latency_us: [[null, 10, 20], [11, null, 21], [22, 12, null]]",
}


@pytest.fixture(
    params=[pytest.param(name, marks=() if name == "network" else pytest.mark.slow) for name in NETWORKS],
    scope="module",
)
def cluster(request, tmp_path_factory):
    text = read_text("scripts/testbed/four-equal.yaml")
    devices = text[text.index("devices:") :]
    nodes = (
        "- {name: fast, count: 2, gpu: cpu-core, gpus: 2}\n- {name: slow, gpu: cpu-core, gpus: 1, speed: 0.5}"
    )
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(f"name: three\nnodes:\n{nodes}\n{NETWORKS[request.param]}\n{devices}")
    return read_cluster(path)


def planned(cluster, words, **sizes):
    model = model_from_arguments(unplaced(words), COMMAND_LINE)
    job = Job(model, 1024, global_batch_size=4, precision="fp32", **sizes)
    return find_plan(Request(job, frozenset(CHOSEN) - {"data_parallel"}), cluster).plan


@pytest.fixture(scope="module")
def plan(cluster):
    return planned(cluster, WORDS)


PLACES = {"fast-0": 2, "fast-1": 2, "slow": 1}
GONE = (("slow",), ("fast-0",), ("fast-0", "fast-1"))


@pytest.mark.parametrize("gone", GONE, ids="+".join)
def test_each_rank_of_the_plan_is_on_a_gpu_that_is_there(cluster, plan, gone):
    present = [(name, i) for name in reversed(PLACES) if name not in gone for i in range(PLACES[name])]
    found = survive(plan, cluster, present, WORDS)
    assert found.plan.gpus is not None
    assert len(set(found.ranks)) == found.plan.ranks == len(found.plan.gpus)
    for gpu, rank in zip(found.plan.gpus, found.ranks, strict=True):
        name, local = present[rank]
        assert gpu == cluster.nodes[cluster.file.find_nodes(name)[0]].ranks[local]
    assert {name.removesuffix("-0") if "slow" in name else name for name in found.left_out} == set(gone)
    # As good in the whole cluster as in the part that it was planned in.
    job = job_of_plan(found.plan, model_from_arguments(unplaced(WORDS), COMMAND_LINE), precision="fp32")
    whole = CostModel(replace(job, global_batch_size=4), cluster).timing(found.plan).phases.total
    assert found.plan.estimate is not None
    assert whole == pytest.approx(found.plan.estimate.iteration_s, rel=0.02)


KINDS = {
    "window": [*WORDS, "--window-size", "255,0", "--window-attn-skip-freq", "2"],
    "sinks": [*WORDS, "--softmax-type", "learnable"],
    "documents": [*WORDS, "--dataloader-inter-document-masking", "--no-rope-fusion"],
    "latent": [
        *(*UNGROUPED, "--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", "32"),
        *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "24"),
        *("--disable-bias-linear", "--no-rope-fusion"),
    ],
    "experts": [*WORDS, *EXPERTS],
}


TWO_LEFT = [("fast-0", 0), ("fast-0", 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cluster", ["network"], indirect=True)
def test_kinds_of_models_are_planned_anew(cluster, kind):
    words = KINDS[kind]
    found = survive(planned(cluster, words), cluster, TWO_LEFT, words)
    assert set(found.plan.gpus or ()) <= set(cluster.nodes[0].ranks)
    assert set(found.left_out) == {"fast-1", "slow-0"}
    assert found.plan.workload.value_size == (24 if kind == "latent" else 16)


@pytest.mark.parametrize("cluster", ["network"], indirect=True)
def test_measured_speeds_decide_how_work_is_divided(cluster, plan):
    """Without the slow node: of the four GPUs left, those of one node run at a third of their speed."""
    present = [(name, i) for name in ("fast-0", "fast-1") for i in range(2)]
    model = model_from_arguments(unplaced(WORDS), COMMAND_LINE)
    slowed, seconds = cluster.at_speeds({2: 1 / 3, 3: 1 / 3}), []
    for speeds in (None, {2: 0.2, 3: 0.46666667}):
        found = survive(plan, cluster, present, WORDS, speeds).plan
        job = replace(job_of_plan(found, model, precision="fp32"), global_batch_size=4)
        seconds.append(CostModel(job, slowed).timing(found).phases.total)
    assert seconds[1] < 0.9 * seconds[0]


def test_while_all_of_a_plan_s_nodes_are_there_it_stays(cluster, plan):
    present = [("slow-0", 0), ("fast-1", 0), ("fast-1", 1), ("fast-0", 0), ("fast-0", 1)]
    found = survive(plan, cluster, present, WORDS)
    assert found.plan is plan
    assert [found.ranks[rank] for rank, gpu in enumerate(plan.gpus or range(5)) if gpu == 4] == [0]
    assert not found.left_out


def test_a_spare_takes_a_lost_node_s_place_and_is_not_missed(cluster):
    """The job's plan leaves the first node out: its own nodes are the others."""
    part = planned(cluster.without({0}), WORDS)
    own = plan_of_whole(part, cluster, {0})
    everywhere = [("fast-1", 0), ("fast-1", 1), ("slow", 0)]
    found = survive(own, cluster, everywhere, WORDS)
    assert (found.plan, found.left_out) == (own, ())
    found = survive(own, cluster, [("slow", 0), ("fast-0", 0), ("fast-0", 1)], WORDS)
    assert found.left_out == ("fast-1",)
    assert set(found.plan.gpus or ()) <= {0, 1, 4}


@pytest.mark.parametrize(
    ("present", "why"),
    [
        ([("h100", 0)], "--node h100: names no node of three"),
        ([("fast", 0), ("fast", 1)], "--node fast: names no node"),
        ([("fast-0", 0)], "1 ranks were started there, fast-0 has 2 GPUs"),
        ([("slow", 0), ("slow", 0)], "2 ranks were started there, slow-0 has 1 GPUs"),
    ],
)
def test_nodes_that_are_none_of_the_cluster_s_are_refused(cluster, plan, present, why):
    with pytest.raises(HexiError, match=why):
        survive(plan, cluster, present, WORDS)


FULL = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"]


def test_a_survivor_s_plan_says_what_the_command_line_leaves_to_it(cluster, plan):
    """The plan has the terms that `hexi plan` writes, and no more, or ranks would refuse the command line."""
    terms = replace(plan, job=JobTerms(recompute="full", precision="fp32", overlap_gradients=False))
    free = [word for word in WORDS if word not in ("--micro-batch-size", "1")] + ["--micro-batch-size", "2"]
    found = survive(terms, cluster, TWO_LEFT, free).plan
    assert (found.job.precision, found.job.overlap_gradients) == ("fp32", False)
    assert found.job.micro_batch_size == 2
    said = [found.job.recompute, *(stage.recompute for stage in found.stages)]
    assert said.count(None) < len(said)
    found = survive(replace(plan, job=JobTerms()), cluster, TWO_LEFT, [*WORDS, *FULL]).plan
    assert found.job.recompute is None
    assert all(stage.recompute is None for stage in found.stages)


@pytest.mark.parametrize("cluster", ["network"], indirect=True)
def test_what_the_command_line_fixes_is_fixed_after_a_loss(cluster):
    first = planned(cluster.without([2]), WORDS, tensor_parallel=2)
    assert first.is_repeated
    first = replace(first, provenance=None)
    found = survive(first, cluster, TWO_LEFT, [*WORDS, "--tensor-model-parallel-size", "2"]).plan
    assert found.is_repeated
    assert found.workload.tensor_parallel == 2


@pytest.mark.parametrize("cluster", ["network"], indirect=True)
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([*EXPERTS, "--tensor-model-parallel-size", "1"], "--tensor-model-parallel-size: plans of a"),
        (["--make-vocab-size-divisible-by", "1"], "--make-vocab-size-divisible-by 1: .* a multiple of 2"),
        (
            ["--num-layers-per-virtual-pipeline-stage", "1"],
            "--num-layers-per-virtual-pipeline-stage: .* give --num-virtual-stages-per-pipeline-rank",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_no_other_plan_could_go_on_with_is_refused_at_the_first_start(cluster, plan, more, why):
    present = [(name, i) for name, count in PLACES.items() for i in range(count)]
    with pytest.raises(HexiError, match=why):
        survive(plan, cluster, present, [*WORDS, *more])


def test_where_nothing_fits_the_advice_is_for_the_nodes_that_are_left(cluster, plan):
    small = cluster.with_memory_margin(0.9)
    unbound = replace(plan, provenance=None)
    with pytest.raises(NothingFitsError, match="no plan"):
        survive(unbound, small, [("slow", 0)], WORDS)


def checkpoint(folder, iteration, *, whole):
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"x")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"})[: None if whole else 9])
    return path


@pytest.mark.parametrize("tracker", ["", "30", "20", "99", None])
def test_the_newest_whole_checkpoint_is_the_one_to_go_on_from(tmp_path, tracker):
    assert newest_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 10, whole=True)
    checkpoint(tmp_path, 20, whole=True)
    checkpoint(tmp_path, 30, whole=False)
    checkpoint(tmp_path, 40, whole=True).joinpath(".metadata").unlink()
    (tmp_path / "iter_x").mkdir()
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    assert newest_checkpoint(tmp_path) == 20
    assert (tmp_path / TRACKER).read_text() == "20"


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[",
        "{}",
        "[" * 50_000,
        '{"present": 5}',
        '{"plan": "", "path": "", "cluster": "", "words": [], "present": [[["a"]]]}',
    ],
)
def test_a_document_that_is_no_request_is_refused(monkeypatch, capsys, document):
    monkeypatch.setattr("sys.stdin", io.StringIO(document))
    with pytest.raises(SystemExit) as ended:
        planning.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert is_one_error_line(said.err)
    assert said.out == ""


def test_files_that_cannot_be_read_are_the_answer(monkeypatch, capsys):
    request = {"plan": "a: [", "path": "p.yaml", "cluster": "absent.yaml", "words": [], "present": [[]]}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    planning.main()
    assert json.loads(capsys.readouterr().out)["error"].startswith("p.yaml:2: not valid YAML")


@pytest.mark.parametrize(
    "words", [[], ["c.yaml"], ["c.yaml", "n", "x"], ["c.yaml", "n", "\u0663"], ["c.yaml", "n", "1"]]
)
def test_the_check_of_a_spare_checks_its_own_words(monkeypatch, capsys, words):
    monkeypatch.setattr("sys.argv", ["node", *words])
    with pytest.raises(SystemExit) as ended:
        node.main()
    assert ended.value.code == 2
    assert is_one_error_line(capsys.readouterr().err)


def test_a_gpu_that_a_node_does_not_have_is_refused(cluster, plan):
    with pytest.raises(HexiError, match="--node fast-0: has no GPU 2"):
        survive(plan, cluster, [("fast-0", 0), ("fast-0", 2)], WORDS)
