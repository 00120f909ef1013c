"""What the planner promises: never slower than Megatron's flags, nor than with more numbers fixed."""

import pytest

from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.planner.baselines import find_faster
from megatron_hexi.planner.notes import gpus_of
from tests.support.fleets import read_text
from tests.support.promises import FOREVER_S, LONGER, UNEVEN_LONGER, broken, plan_case, random_promise

#: Of all cases, one that takes a few seconds.
QUICK = 17


def check(seed, *, uneven=False):
    case = random_promise(seed, uneven=uneven)
    found = plan_case(case)
    lines = broken(found, UNEVEN_LONGER if uneven else LONGER)
    assert not lines, f"{lines}\n{case.text}{case.job}\n{case.fixed}"
    return found


def test_plans_of_a_fleet_keep_the_promises():
    found = check(QUICK)
    assert sum(one.seconds is not None for one in found) > 1
    assert any(one.megatron_s is not None for one in found)


#: HexiSeq's seventh random cluster, whose nodes have 2 to 8 GPUs, over a network of 25 GB/s.
UNEVEN = """
name: uneven
nodes:
- {name: a, gpu: B200-180GB, gpus: 5}
- {name: b, gpu: H100-NVL-94GB, gpus: 4}
- {name: c, gpu: B200-180GB, gpus: 6}
- {name: d, gpu: B200-180GB, gpus: 5}
- {name: e, gpu: H100-NVL-94GB, gpus: 2}
- {name: f, gpu: H100-NVL-94GB, gpus: 5}
- {name: g, gpu: B200-180GB, gpus: 8}
- {name: h, gpu: H100-NVL-94GB, gpus: 4}
network: {bandwidth_gb_s: 25, latency_us: 10, per: gpu}
"""


def test_no_node_alone_is_faster_than_the_fleet():
    """With all sizes fixed, the node of 8 is: the search must not pass over it among 220 choices of GPUs."""
    job = Job(model=read_model("gpt-3b"), seq_length=2**15, global_batch_size=1, recompute="full")
    request, fleet = Request(job, frozenset(CHOSEN)), read_text(UNEVEN)
    found = find_plan(request, fleet)
    nodes = range(len(fleet.nodes))
    alone = [find_plan(request, fleet.without(set(nodes) - {node})) for node in nodes]
    assert found.cost.iteration_s <= min(one.cost.iteration_s for one in alone) * LONGER
    assert len(gpus_of(found.plan, fleet)) == 8


def test_units_use_what_they_can_of_a_node_with_a_dead_gpu():
    """A plan has 4 or 6 GPUs of a node of 7, in units of 4 or 2, and is faster than one without the node."""
    text = """
name: seven
nodes:
- {name: whole, count: 3, gpu: H100-SXM-80GB, gpus: 8}
- {name: seven, gpu: H100-SXM-80GB, gpus: 7}
network: {bandwidth_gb_s: 50, latency_us: 10, per: gpu}
"""
    job = Job(model=read_model("llama3-70b"), seq_length=2**13, global_batch_size=64)
    request, fleet = Request(job), read_text(text)
    found, without = (find_plan(request, each) for each in (fleet, fleet.without({3})))
    assert found.cost.iteration_s < 0.9 * without.cost.iteration_s
    assert sum(fleet.ranks[gpu].node == 3 for gpu in gpus_of(found.plan, fleet)) in (4, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(60) if seed != QUICK])
def test_plans_of_sixty_fleets_keep_the_promises(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_plans_of_sixty_fleets_whose_nodes_lack_gpus_keep_the_promises(seed):
    check(seed, uneven=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "seq_length", "batch"),
    [
        ({"H100-SXM-80GB": 8, "A100-SXM-80GB": 8}, 2**13, 64),
        ({"H100-SXM-80GB": 6, "A100-SXM-80GB": 5, "L40S-48GB": 5}, 2**15, 128),
        ({"H200-SXM-141GB": 16}, 2**14, 64),
        ({"H100-SXM-80GB": 20, "A800-SXM-80GB": 12}, 2**16, 64),
    ],
)
def test_plans_of_large_fleets_are_no_slower_than_megatron_s_flags(kinds, seq_length, batch):
    nodes = "\n".join(
        f"- {{name: n{place}, count: {count}, gpu: {kind}, gpus: 8}}"
        for place, (kind, count) in enumerate(kinds.items())
    )
    text = f"name: large\nnodes:\n{nodes}\nnetwork: {{bandwidth_gb_s: 25, latency_us: 10, per: gpu}}\n"
    request = Request(Job(read_model("llama3-70b"), seq_length, global_batch_size=batch))
    found, fleet = find_plan(request, read_text(text)), read_text(text)
    best, _ = find_faster(request, fleet, FOREVER_S)
    assert best is None or found.cost.iteration_s <= best.iteration_s * (1 + 1e-9)
