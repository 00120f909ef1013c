"""More nodes, memory or bandwidth never make a plan slower; for fewer fixed sizes see test_promises."""

import re

import pytest

from megatron_hexi.planner import find_plan
from tests.support.fleets import read_text
from tests.support.promises import random_promise

#: A plan with more may take so much longer.
LONGER = 1.002
#: Pairs that take a second or two.
QUICK = (("network", 1), ("memory", 1), ("node", 1))


def pair_of(change, seed):
    """A request, a fleet, and the fleet with more."""
    case = random_promise(seed)
    request = case.request(0)
    match change:
        case "network":
            (rate,) = map(float, re.findall(r"bandwidth_gb_s: ([0-9.]+)", case.text))
            text = re.sub(r"bandwidth_gb_s: [0-9.]+", f"bandwidth_gb_s: {1.5 * rate}", case.text)
            return request, case.cluster, read_text(text)
        case "memory":
            return request, case.cluster, case.cluster.with_memory_margin(-0.25)
        case "node":
            count = int(re.findall(r"count: (\d+)", case.text)[0])
            text = case.text.replace(f"count: {count},", f"count: {count + 1},", 1)
            return request, case.cluster, read_text(text)


def check(change, seed):
    request, fleet, more = pair_of(change, seed)
    before, after = (find_plan(request, each).cost.iteration_s for each in (fleet, more))
    assert after <= before * LONGER


@pytest.mark.parametrize(("change", "seed"), QUICK)
def test_more_is_no_slower(change, seed):
    check(change, seed)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["network", "memory", "node"])
@pytest.mark.parametrize("seed", range(13))
def test_more_is_no_slower_on_random_fleets(change, seed):
    if (change, seed) not in QUICK:
        check(change, seed)
