"""`hexi plan`, `compare` and `simulate` with the planner and the simulator as they are."""

import json
import re
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.plan import read_plan
from tests.unit.cli.conftest import ARGUMENTS, CLUSTER, JOB


def test_what_is_planned_is_what_is_validated_shown_and_simulated(hexi):
    code, out, _ = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--json")
    planned = json.loads(out)
    assert code == 0
    assert planned["iteration_s"] >= planned["lower_bound_s"] * (1 - 1e-9)
    assert planned["tokens_per_s"] <= planned["ceiling_tokens_per_s"]

    # The plan names its model.
    job = "--cluster", "cluster.yaml", "--recompute-granularity", "full", "--json"
    code, out, _ = hexi("validate", "plan.yaml", *job)
    checked = json.loads(out)["estimate"]
    assert code == 0
    for name in ("tokens_per_s", "iteration_s", "memory_gib"):
        assert checked[name] == pytest.approx(planned[name])

    shown = hexi("show", "plan.yaml")
    assert shown.code == 0
    assert f"no plan takes less than {planned['lower_bound_s']:.3f} s" in shown.out

    code, out, err = hexi("simulate", "plan.yaml", *job, "--trace", "trace.json", "--picture", "sim.png")
    simulated = json.loads(out)
    assert (code, err) == (0, "wrote trace.json\ndrew sim.png\n")
    assert simulated["fits"] is True
    # Two ways to the same: far apart, one of them is wrong.
    assert simulated["iteration_s"] == pytest.approx(planned["iteration_s"], rel=0.3)
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    on_ranks = {event["pid"] for event in events if event["ph"] == "X" and event["cat"] != "pipeline"}
    assert on_ranks == {member.lead for member in read_plan("plan.yaml").members}
    assert Path("sim.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_reports_and_says_what_does_not_fit(hexi):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    report = hexi("simulate", "plan.yaml", "--cluster", "cluster.yaml")
    assert (report.code, report.err) == (0, "")
    assert "simulated: " in report.out
    words = ("plan", "cluster.yaml", *JOB, "--seq-length", 131072, "-o", "long.yaml")
    assert hexi(*words).code == 0
    contradicted = hexi("simulate", "long.yaml", "--cluster", "cluster.yaml", "--precision", "fp32")
    assert contradicted.code == 2
    assert "long.yaml: job.precision is bf16, the command line has --precision fp32" in contradicted.err
    text = Path("long.yaml").read_text()
    Path("long.yaml").write_text(re.sub("recompute: full", "recompute: none", text))
    crowded = hexi("simulate", "long.yaml", "--cluster", "cluster.yaml", "--json")
    assert crowded.code == 0
    assert crowded.err.startswith("note: long.yaml does not fit in memory: rank ")
    assert json.loads(crowded.out)["fits"] is False


def test_compare_has_every_baseline_and_hexi_first(hexi):
    code, out, err = hexi("compare", "cluster.yaml", *JOB, "--json")
    document = json.loads(out)
    names = [one["name"] for one in document["results"]]
    assert (code, err, names[0]) == (0, "", "hexi")
    assert {
        *("ring", "ulysses", "usp", "te-a2a+p2p", "proportion", "homogeneous", "uneven-layers"),
    } == set(names[1:])
    for one in document["results"]:
        assert (one["tokens_per_s"] is None) == bool(one["why_not"])
        assert one["layout"] or one["why_not"]


@pytest.mark.slow  # planner/test_determinism.py asks the planner itself
def test_the_same_input_gives_the_same_plan(hexi):
    for name in ("one.yaml", "two.yaml"):
        assert hexi("plan", "cluster.yaml", *JOB, "-o", name).code == 0
    assert Path("one.yaml").read_bytes() == Path("two.yaml").read_bytes()


def test_a_plan_on_a_part_of_the_cluster_names_its_gpus(hexi):
    # Three of one node cannot take part in units of two.
    Path("cluster.yaml").write_text(CLUSTER.replace("gpus: 4}", "gpus: 3}", 1))
    words = (*JOB, "--tensor-model-parallel-size", 2, "-o", "plan.yaml", "--json")
    code, out, _ = hexi("plan", "cluster.yaml", *words)
    document = json.loads(out)
    assert code == 0
    assert 2 not in document["gpus"]
    assert any("left out" in note for note in document["notes"])
    assert "ranks must be started on these GPUs" in hexi("show", "plan.yaml").out
    assert (
        hexi("validate", "plan.yaml", "--cluster", "cluster.yaml", "--recompute-granularity", "full").code
        == 0
    )


def test_a_spare_is_left_out_of_a_plan_for_the_whole_cluster(hexi):
    Path("cluster.yaml").write_text(CLUSTER)
    nodes = read_cluster("cluster.yaml").nodes
    first = nodes[0].name
    code, out, err = hexi("plan", "cluster.yaml", *JOB, "--spare", first, "-o", "plan.yaml", "--json")
    assert code == 0, err
    plan = read_plan("plan.yaml")
    assert set(plan.gpus or ()) <= {gpu for node in nodes[1:] for gpu in node.ranks}
    assert json.loads(out)["launch"]["torchrun"]
    assert (
        f"# spare {first}: waits" in hexi("plan", "cluster.yaml", *JOB, "--spare", first, "-o", "p.yaml").out
    )
    checked = hexi("validate", "plan.yaml", "--cluster", "cluster.yaml", "--recompute-granularity", "full")
    assert (checked.code, "different cluster" in checked.err) == (0, False)
    for wrong, why in ((["h9"], "names no node"), ([node.name for node in nodes], "leaves no node")):
        spares = [word for name in wrong for word in ("--spare", name)]
        code, _, err = hexi("plan", "cluster.yaml", *JOB, *spares, "-o", "other.yaml")
        assert (code, why in err, Path("other.yaml").exists()) == (2, True, False)


def test_a_plan_s_terms_stand_before_those_of_its_model_s_file(hexi):
    Path("job.args").write_text(ARGUMENTS)
    assert (
        hexi(
            *("plan", "cluster.yaml", "--model", "job.args", "--recompute-granularity", "full"),
            # Stages of their own state what they recompute.
            *("--no-unequal-stages", "--pipeline-model-parallel-size", 1, "-o", "p.yaml"),
        ).code
        == 0
    )
    planned = json.loads(hexi("validate", "p.yaml", "--cluster", "cluster.yaml", "--json").out)
    assert planned["estimate"]["iteration_s"] == pytest.approx(
        read_plan("p.yaml").estimate.iteration_s  # type: ignore[union-attr]
    )
    # A plan that says nothing of its job, as one written by hand: then the command line and the file do.
    text = Path("p.yaml").read_text()
    Path("p.yaml").write_text(re.sub(r"\njob:\n(  .*\n)+", "\n", text))
    other = ("--recompute-granularity", "none", "--json")
    changed = json.loads(hexi("validate", "p.yaml", "--cluster", "cluster.yaml", *other).out)
    assert changed["estimate"]["iteration_s"] < planned["estimate"]["iteration_s"]
    done = hexi("validate", "p.yaml", "--cluster", "cluster.yaml", "--json")
    assert done.err.startswith("note: job.args says --micro-batch-size 2 ")
    found = json.loads(done.out)["estimate"]["iteration_s"]
    assert changed["estimate"]["iteration_s"] < found < planned["estimate"]["iteration_s"]
