"""Plans of a round: asked of the planner once, and made ahead for the loss of each node."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.store import DECISION, WANTED, add_spare
from megatron_hexi.elastic.training import round_plan
from megatron_hexi.elastic.training.round_plan import _plan_losses, choose_plan, plan_for, tell_speeds

PRESENT = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]


@pytest.fixture
def asked(tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("a file")
    return {"plan": "a plan", "path": "plan.yaml", "cluster": str(cluster), "words": []}


def answers(document):
    """A planner that leaves out whatever is on c."""
    for present in document["present"]:
        places = [place for place in present if place[0] != "c"]
        yield json.dumps({"plan": f"for {len(places)}", "places": places, "left_out": ["d"]})


@pytest.fixture
def planner(monkeypatch):
    calls = []

    def run(command, input, **named):
        calls.append(json.loads(input)["present"])
        return SimpleNamespace(returncode=0, stdout="\n".join(answers(json.loads(input))), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_planner_is_asked_once_for_the_same_nodes_in_any_order(asked, planner):
    job = dist.HashStore()
    found = plan_for(job, asked, PRESENT)
    assert (found["plan"], found["left_out"], found["ranks"]) == ("for 3", ["d"], [0, 1, 2])
    assert plan_for(job, asked, PRESENT[::-1])["ranks"] == [3, 2, 1]
    assert len(planner) == 1
    plan_for(job, asked, PRESENT[:3])
    plan_for(job, asked | {"words": ["--bf16"]}, PRESENT)
    assert len(planner) == 3


def test_a_plan_that_was_chosen_stays_while_the_same_nodes_are_there(asked, planner, monkeypatch):
    job, now = dist.HashStore(), dist.HashStore()
    monkeypatch.setattr(round_plan, "whole_store", lambda: job)
    monkeypatch.setattr(round_plan, "round_store", lambda: now)
    monkeypatch.setattr(round_plan, "ask_fence", lambda: None)
    now.set(DECISION, json.dumps(plan_for(job, asked, PRESENT)))
    choose_plan("with other layers", "other layers in its stages")
    assert now.get(WANTED) == b"other layers in its stages"
    tell_speeds({"0": 1.0, "1": 0.5})
    found = plan_for(job, asked, PRESENT[::-1])
    assert (found["plan"], found["left_out"], found["ranks"]) == ("with other layers", ["d"], [3, 2, 1])
    assert len(planner) == 1
    assert plan_for(job, asked, PRESENT[:2])["plan"] == "for 2"
    assert len(planner) == 2


def test_plans_for_each_loss_are_made_ahead_with_and_without_a_spare(asked, planner, monkeypatch):
    job = dist.HashStore()
    script = (
        "import json, sys\n" + inspect.getsource(answers) + "print(*answers(json.load(sys.stdin)), sep='\\n')"
    )
    monkeypatch.setattr(round_plan, "_COMMAND", (sys.executable, "-c", script))
    planned = _plan_losses(job, asked, PRESENT, set())
    add_spare(job, "e", 2)
    planned |= _plan_losses(job, asked, PRESENT, planned)
    assert len(planned) == 6
    for lost, ranks in (("a", [0]), ("b", [0, 1]), ("c", [0, 1, 2])):
        left = [place for place in PRESENT if place[0] != lost]
        assert plan_for(job, asked, left)["ranks"] == ranks
        behind = [*ranks, len(left), len(left) + 1]
        assert plan_for(job, asked, [*left, ("e", 0), ("e", 1)])["ranks"] == behind
    assert not planner


def test_what_the_planner_refuses_is_said_and_not_kept(asked, monkeypatch):
    refused = SimpleNamespace(returncode=0, stdout='{"error": "too small"}', stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **named: refused)
    job = dist.HashStore()
    assert plan_for(job, asked, PRESENT) == {"error": "too small"}
    broken = SimpleNamespace(returncode=1, stdout="", stderr="no such module\n")
    monkeypatch.setattr(subprocess, "run", lambda *words, **named: broken)
    assert "no such module" in plan_for(job, asked, PRESENT)["error"]
