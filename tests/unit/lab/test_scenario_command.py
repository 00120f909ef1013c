"""`hexi simulate --scenario`: what it prints and draws, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.lab.scenario import read_scenario
from megatron_hexi.plan import proportional_plan, write_plan
from tests.support.shell import call_hexi, is_one_error_line
from tests.unit.lab.test_scenario import JOB

EXAMPLES = Path(__file__).parents[3] / "examples"

CLUSTER = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: a100, gpu: A100-SXM-80GB, gpus: 2}
network: {bandwidth_gb_s: 25}
"""
SEEDED = """\
lasts: 10m
random:
  seed: 3
  throttles: {mean_time_between: 20m, lasts: 2m, speed_factor: 0.6}
"""
JOB_WORDS = (
    *("--cluster", "cluster.yaml", "--model", "gpt-3b", "--recompute-granularity", "full"),
    *("--micro-batch-size", 1, "--pipeline-model-parallel-size", 1),
)


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """``hexi simulate`` of a plan and a scenario from its text."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    workload = replace(JOB.workload(), seq_length=16384, heads=32, kv_heads=32, layers=32, hidden_size=2560)
    write_plan(proportional_plan(replace(workload, head_dim=80), [[[3.0, 3.0], [1.0, 1.0]]]), "plan.yaml")

    def run(text, *words):
        Path("scenario.yaml").write_text(text)
        given = ["simulate", "plan.yaml", *JOB_WORDS, "--scenario", "scenario.yaml", *words]
        return call_hexi(monkeypatch, capsys, given)

    return run


def test_the_same_seed_gives_the_same_bytes(simulate):
    code, out, err = simulate(SEEDED, "--json", "--picture", "scenario.svg")
    assert code == 0, err
    assert simulate(SEEDED, "--json").out == out
    told = json.loads(out)
    assert [one["policy"] for one in told["policies"]] == ["static", "re-planning", "oracle"]
    assert told["events"]
    for one in told["policies"]:
        tokens = one["iterations"] * told["tokens_per_iteration"]
        assert one["goodput_tokens_per_s"] == pytest.approx(tokens / told["lasts_s"])
    drawn = Path("scenario.svg").read_text()
    assert "<svg" in drawn


BROKEN = {
    "empty": ("", "scenario.yaml:1: is empty"),
    "a list": ("[1]", "a scenario is a mapping"),
    "no lasts": ("lost: []", "lasts is missing"),
    "seconds without a unit": ("lasts: 3600", "lasts = 3600 is no duration; write 90s"),
    "words for a duration": ("lasts: soon", "lasts = 'soon' is no duration"),
    "nothing lasts": ("lasts: 0s", "lasts = '0s' is too small"),
    "centuries": ("lasts: 99999d", "is no duration"),
    "unknown field": ("{lasts: 1h, crashed: []}", "crashed is not a known field"),
    "unknown GPU": (
        "lasts: 1h\nthrottled:\n- {gpus: v100, speed_factor: 0.5}",
        "scenario.yaml:3: throttled[0].gpus = 'v100' is not a GPU, node or kind",
    ),
    "faster": (
        "{lasts: 1h, throttled: [{gpus: h100, speed_factor: 2.0}]}",
        "throttled[0].speed_factor = 2.0 is too large",
    ),
    "stopped": (
        "{lasts: 1h, throttled: [{gpus: h100, speed_factor: 0.0}]}",
        "speed_factor = 0.0 is too small",
    ),
    "unknown link": (
        "{lasts: 1h, congested: [{link: rack 0, bandwidth_factor: 0.5}]}",
        "is not a link of the cluster",
    ),
    "unknown node": (
        "{lasts: 1h, lost: [{nodes: h100-1, at: 1m}]}",
        "lost[0].nodes = 'h100-1' is not a node",
    ),
    "too late": ("{lasts: 1h, lost: [{nodes: h100, at: 1h}]}", "lost[0].at = 3600 s is not before the end"),
    "backwards": ("{lasts: 1h, lost: [{nodes: h100, at: 9m, until: 5m}]}", "until = 300 s is not after at"),
    "too many": (
        "{lasts: 300d, random: {failures: {mean_time_between: 1s, repair: 1s}}}",
        "random: draws more than 20,000 events",
    ),
    "an interval of one": ("{lasts: 1h, replanning: {interval: 1}}", "replanning.interval = 1 is too small"),
    "half an iteration": ("{lasts: 1h, recovery: {checkpoint_every: 0.5}}", "checkpoint_every = 0.5"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_scenarios_are_refused_in_one_line(simulate, case):
    text, said = BROKEN[case]
    code, out, err = simulate(text, "--picture", "scenario.png")
    assert (code, out) == (2, "")
    assert is_one_error_line(err), err
    assert said in err
    assert "scenario.yaml:" in err
    assert not Path("scenario.png").exists()


def test_a_trace_is_of_one_iteration(simulate):
    code, _, err = simulate(SEEDED, "--trace", "trace.json")
    assert code == 2
    assert "--trace trace.json: shows one iteration, --scenario plays many; leave out one" in err


@pytest.mark.parametrize("path", sorted((EXAMPLES / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_for_the_example_cluster(path):
    _, events = read_scenario(path, read_cluster(EXAMPLES / "clusters/mixed-16.yaml"))
    assert events
