"""`hexi validate` with a cluster: what it prints, and what it refuses."""

import json
import re

import pytest

from megatron_hexi.cli import main as cli
from megatron_hexi.cluster import cluster_digest, read_cluster
from megatron_hexi.models import presets
from megatron_hexi.plan import Provenance, Workload, plan_digest, proportional_plan, read_plan, write_plan

CLUSTER = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 4}
- {name: a100, gpu: A100-SXM-80GB, gpus: 4}
network: {bandwidth_gb_s: 25}
"""


@pytest.fixture
def hexi(monkeypatch, capsys):
    """Calls ``hexi validate WORDS…``: exit code, standard output, standard error."""
    monkeypatch.delenv("RANK", raising=False)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["hexi", "validate", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def plan_of(tmp_path):
    def make(seq_length=16384, speeds=((3,) * 4, (1,) * 4), provenance=None):
        model = presets()["llama3-8b"]
        workload = Workload(seq_length, model.heads, model.kv_heads, model.head_dim, layers=model.layers)
        path = tmp_path / "plan.yaml"
        plan = proportional_plan(workload, [speeds], window=2)
        write_plan(type(plan)(plan.workload, plan.replicas, plan.exchange, provenance=provenance), path)
        return path

    return make


ARGUMENTS = ("--model", "llama3-8b", "--recompute-granularity", "full")


def test_time_and_memory_are_printed(hexi, plan_of, cluster):
    plan = plan_of()
    code, out, err = hexi(plan, "--cluster", cluster, *ARGUMENTS)
    assert (code, err) == (0, "")
    assert out.startswith(f"{plan}: a valid plan for 8 ranks\n")
    assert re.search(
        r"predicted: [\d.]+ s per iteration, [\d,]+ tokens/s \([\d,]+ per GPU, .*MFU [\d.]+%", out
    )
    assert re.search(r"\d+% of the ceiling", out)
    for word in ("exposed", "attention", "weights", "usable", "h100-0/0", "a100-0/0"):
        assert word in out


def test_the_document_is_complete(hexi, plan_of, cluster):
    plan = plan_of()
    code, out, err = hexi(plan, "--cluster", cluster, *ARGUMENTS, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["digest"] == plan_digest(read_plan(plan))
    assert (document["valid"], document["ranks"], document["cluster"]) == (True, 8, str(cluster))
    found = document["estimate"]
    assert found["fits"] is True
    assert found["shortage"] is None
    assert sum(found["phases_s"].values()) == pytest.approx(found["iteration_s"])
    assert len(found["memory_gib"]) == len(found["ranks"]) == 8
    rank = found["ranks"][0]
    assert rank["memory_gib"]["total"] == pytest.approx(found["memory_gib"][0])
    assert rank["device"] == "H100-SXM-80GB"
    assert found["tokens_per_s"] == pytest.approx(8 * 16384 / found["iteration_s"])


def test_the_plan_may_name_its_model(hexi, plan_of, cluster):
    plan = plan_of(provenance=Provenance(model="llama3-8b"))
    assert hexi(plan, "--cluster", cluster, "--recompute-granularity", "full")[0] == 0


def test_what_does_not_fit_is_refused_with_rank_term_and_size(hexi, plan_of, cluster):
    plan = plan_of(seq_length=2**20)
    code, out, err = hexi(plan, "--cluster", cluster, "--model", "llama3-8b", "--json")
    document = json.loads(out)
    assert code == 2
    assert re.fullmatch(
        r"hexi: error: .*plan.yaml: does not fit: rank \d \(\S+, \S+\) needs [\d.]+ GiB and has 78.0: "
        r"[\d.]+ GiB short, and 7 more ranks; most of it is activations, [\d.]+ GiB: .*\n",
        err,
    )
    assert document["valid"] is False
    assert document["error"] in err
    assert document["estimate"]["shortage"]["term"] == "activations"
    code, out, err = hexi(plan, "--cluster", cluster, "--model", "llama3-8b")
    assert (code, err.count("\n")) == (2, 1)
    assert "usable" in out


NAMED = ("--cluster", "CLUSTER", "--model")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama3-8b"], "without --cluster; add --cluster CLUSTER.yaml"),
        (["--cluster", "CLUSTER"], "add --model NAME|PATH"),
        (["--cluster", "absent.yaml", "--model", "llama3-8b"], "absent.yaml: cannot be read"),
        ([*NAMED, "llama-8b"], "did you mean llama3-8b"),
        ([*NAMED, "gpt-3b"], "workload.kv_heads: the plan is for 8, but the job has 32"),
        ([*NAMED, "llama3-8b", "--recompute-granularity", "all"], "--recompute-granularity all: use none"),
        ([*NAMED, "llama3-8b", "--precision", "int4"], "--precision int4: use bf16"),
        ([*NAMED, "llama3-8b", "--micro-batch-size", "3"], "--global-batch-size 8"),
        ([*NAMED, "llama3-8b", "--pipeline-model-parallel-size", "2"], "the plan is for 16 (8 ranks"),
    ],
)
def test_what_does_not_belong_together_is_one_clear_error(hexi, plan_of, cluster, words, said):
    words = [str(cluster) if word == "CLUSTER" else word for word in words]
    code, _, err = hexi(plan_of(), *words)
    assert code == 2
    assert said in err
    assert err.startswith("hexi: error: ")
    assert err.count("\n") == 1


def test_another_number_of_ranks_is_refused(hexi, plan_of, cluster):
    code, _, err = hexi(plan_of(speeds=((3,) * 4, (1,))), "--cluster", cluster, *ARGUMENTS)
    assert code == 2
    assert f"plan.yaml on {cluster}: cluster small has 8 GPUs, but the plan is for 5 (5 ranks)" in err


def test_another_cluster_than_the_plan_s_is_said(hexi, plan_of, cluster):
    own = cluster_digest(read_cluster(cluster))
    for digest, said in ((own, False), (None, False), ("0" * 64, True)):
        plan = plan_of(provenance=Provenance(cluster="mixed-8", cluster_digest=digest))
        code, _, err = hexi(plan, "--cluster", cluster, *ARGUMENTS)
        assert code == 0
        note = (
            f"note: {plan} was made for a different cluster (mixed-8) than {cluster}; to train there "
            "make a plan"
        )
        assert (note in err) is said
