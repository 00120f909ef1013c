"""Plans of models with kinds of layers against all sets of replicas, pipelines and stages on eight GPUs."""

import dataclasses

import pytest

from megatron_hexi.kinds import Experts
from megatron_hexi.models import Job, Model
from megatron_hexi.planner import Request, find_plan
from tests.support.exhaustive import best_plan, dealt, pipelines, replica_sets
from tests.support.fleets import read_text
from tests.unit.planner.test_kinds import ALL, FLEET, LATENT, SOME

K = 1024
SPARSE = Model(
    *("sparse", 8, 2048, 16, 4, 128, 6144, True, 64_000, False),
    experts=Experts(32, 4, 1024, layers=(False,) + (True,) * 7),
)
BOTH = dataclasses.replace(SOME, name="both", experts=Experts(32, 4, 1024))


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize(
    ("model", "seq_length", "batch"),
    [
        (SOME, 8 * K, 16),
        (ALL, 32 * K, 8),
        (LATENT, 64 * K, 4),
        (SPARSE, 8 * K, 16),
        (SPARSE, 32 * K, 8),
        (BOTH, 16 * K, 8),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else str(value),
)
def test_a_plan_is_within_two_percent_of_the_best_of_all_sets(model, seq_length, batch):
    cluster = read_text(FLEET)
    request = Request(Job(model, seq_length, global_batch_size=batch))
    planned = find_plan(request, cluster)
    best, sets = best_plan(request, cluster)
    print(f"{model.name}: {planned.cost.iteration_s:.4f} s, the best of {sets} sets {best.iteration_s:.4f} s")
    assert sets > 5000
    assert planned.cost.iteration_s <= 1.02 * best.iteration_s


def test_every_pipeline_and_every_set_of_replicas_is_tried():
    # Ordered partitions of (2, 2), and all multisets of up to three parts of (2, 1).
    assert len(set(pipelines((2, 2), [1], 4))) == 26
    assert {len(stages) for stages in pipelines((2, 2), [1, 2], 2)} == {1, 2}
    sets = list(replica_sets((2, 1), 3))
    assert len(sets) == len(set(sets)) == 1 + 5 + 4 + 1


def test_micro_batches_are_dealt_to_whoever_is_done_first():
    class Replica:
        def __init__(self, each):
            self.each = each

        def seconds(self, count):
            return 1 + count * self.each

    assert dealt([Replica(1.0), Replica(2.0)], 9) == (6, 3)
