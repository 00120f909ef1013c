"""No plan is improved by more than one per cent by changes that a user might make by hand, on odd fleets."""

from __future__ import annotations

import pytest

from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from tests.support.fleets import read_text
from tests.support.mover import climb, neighbours

H100, H200, A100, A100_40 = "H100-SXM-80GB", "H200-SXM-141GB", "A100-SXM-80GB", "A100-SXM-40GB"
A800, L40S, A10G, RTX = "A800-SXM-80GB", "L40S-48GB", "A10G-24GB", "RTX4090-24GB"
K = 1024
#: Nodes (GPU, number of them), model, tokens of a sequence, batch; and GB/s of each GPU's network.
FLEETS = (
    (((H100, 3), (A100, 2)), "gpt-3b", 16 * K, 8, 25),
    (((A100_40, 3), (L40S, 2)), "gpt-3b", 32 * K, 6, 5),
    (((H200, 2), (L40S, 3)), "llama3-8b", 16 * K, 12, 25),
    (((A800, 2), (H200, 2), (H100, 4)), "gpt-7b", 16 * K, 24, 25),
    (((RTX, 2), (L40S, 6)), "gpt-7b", 32 * K, 8, 5),
    (((H100, 7), (A800, 3)), "llama3-8b", 64 * K, 16, 25),
    (((A100, 6), (A100, 5), (H100, 6)), "mistral-7b", 64 * K, 16, 25),
    (((H100, 4), (A10G, 2), (A10G, 2)), "gpt-7b", 4 * K, 64, 25),
    (((H200, 6), (L40S, 4), (L40S, 4)), "mistral-7b", 4 * K, 16, 5),
    (((A100_40, 4), (A100, 3), (H100, 2)), "gpt-13b", 8 * K, 24, 25),
    (((L40S, 5), (A100_40, 4)), "llama3-8b", 32 * K, 10, 0.7),
    (((H100, 5), (A100, 4), (L40S, 3)), "gpt-13b", 32 * K, 12, 50),
)
#: Timings of neighbours, and the part of an iteration that they may gain.
TIMINGS, GAIN = 400, 0.01


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.slow if number > 1 else ()) for number in range(len(FLEETS))],
)
def test_changes_by_hand_gain_little(number):
    nodes, model, length, batch, bandwidth = FLEETS[number]
    text = "".join(f"- {{name: n{n}, gpu: {gpu}, gpus: {count}}}\n" for n, (gpu, count) in enumerate(nodes))
    network = f"network: {{bandwidth_gb_s: {bandwidth}, latency_us: 10, per: gpu}}\n"
    cluster = read_text(f"name: odd\nnodes:\n{text}{network}")
    planned = find_plan(Request(Job(read_model(model), length, global_batch_size=batch)), cluster)
    assert sum(1 for _ in neighbours(planned.plan, cluster)) > 3
    moved_s = climb(planned.plan, planned.job, cluster, TIMINGS)
    assert planned.cost.iteration_s <= (1 + GAIN) * moved_s
