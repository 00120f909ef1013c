"""The measured imbalance of experts is that of the routers' choices, in log, metrics and record."""

from __future__ import annotations

import json
import re

import pytest

from megatron_hexi.record import read_record
from tests.megatron.conftest import job
from tests.megatron.option_cases import EXPERTS, Case
from tests.megatron.test_stages_experts import MODEL as IN_STAGES
from tests.support.expert_layouts import expert_layout

#: Two of four experts have all rows: the standard deviation is the mean. Two of eight: its root of 3.
FORCED = {("groups", "one"): 1.0, ("groups", "even"): 0.0, ("uneven", "one"): 3**0.5, ("uneven", "even"): 0.0}


@pytest.mark.parametrize(
    ("layout", "how"),
    [pytest.param(*case, marks=[] if case == ("groups", "one") else pytest.mark.slow) for case in FORCED],
)
def test_forced_routes_have_the_imbalance_that_they_make(layout, how, forks, tmp_path):
    model = (*EXPERTS, "--moe-layer-freq", "[0,1]") if layout == "groups" else IN_STAGES
    plan = Case().plans()["groups"] if layout == "groups" else expert_layout(layout, tmp_path)
    words = [how, *job(model), "--train-iters", "4", "--log-interval", "2"]
    words += ["--hexi-record", tmp_path / "record.jsonl"]
    log = forks.train(
        tmp_path, ranks=plan.ranks, args=words, plan=plan, entry="tests.megatron.skewed", timeout=300
    )
    (leg,) = read_record(tmp_path / "record.jsonl").legs
    found = [interval.expert_imbalance for interval in leg.intervals]
    # In turn, each rank may give some experts one row more.
    assert found == pytest.approx([FORCED[layout, how]] * len(found), abs=1e-6 if how == "one" else 0.05)
    (metrics,) = tmp_path.glob("metrics-*.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    said = [line["expert_imbalance"] for line in lines if "expert_imbalance" in line]
    assert said == pytest.approx(found, abs=1e-6)
    assert len(re.findall(r"expert imbalance: ", log.output)) == len(found)
