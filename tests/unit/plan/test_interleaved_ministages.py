"""Plans whose ministages are interleaved: how they are read, and what is refused."""

from __future__ import annotations

import pytest

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import dump_plan

INTERLEAVED = """\
version: 2
workload: {seq_length: 16, heads: 4, kv_heads: 4, head_dim: 4, layers: 9}
job: {micro_batch_size: 2}
replicas:
- micro_batches: 4
  order: interleaved
  stages:
  - {layers: [0, 4], ministages: [3, 1], domains: [{ranks: [0]}]}
  - {layers: [4, 9], ministages: 2, domains: [{ranks: [1]}]}
"""


def test_a_stage_may_give_the_layers_of_each_ministage(read):
    (replica,) = read(INTERLEAVED).replicas
    assert replica.is_interleaved
    assert [replica.ministage_layers(number) for number in range(2)] == [((0, 3), (6, 7)), ((3, 6), (7, 9))]
    (again,) = read(dump_plan(read(INTERLEAVED))).replicas
    assert again == replica


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "[3, 1]",
            "[3, 2]",
            ":8: replicas[0].stages[0].ministages have 5 layers together, the stage has 4 layers",
        ),
        ("[3, 1]", "[4]", ":9: replicas[0].stages[1].ministages is 2, in the replica's first stage 1"),
        ("[3, 1]", "[4, 0]", ":8: replicas[0].stages[0].ministages[1] = 0 is too small; the least is 1"),
        ("order: interleaved", "order: turned", ":6: replicas[0].order = 'turned' is not known"),
        (
            "[0, 4], ministages: [3, 1]",
            "[0, 4], recompute: 2, ministages: [3, 1]",
            "recompute is 2, and layers are computed again in all ministages or in none; give none",
        ),
        (
            "ministages: 2",
            "ministages: 2, offload: [optimizer, parameters]",
            "offload[1] is parameters, of a replica with order: interleaved, which always uses them",
        ),
        (
            "ministages: 2",
            "ministages: 2, offload: [activations]",
            "offload[0] is activations, of a replica with order: interleaved, which always uses them",
        ),
        (
            "{ranks: [1]}",
            "{ranks: [1], micro_batches: 4}",
            "micro_batches is 4, in a replica with order: interleaved, where all take part in each",
        ),
    ],
)
def test_a_broken_rule_of_interleaved_ministages(old, new, says, read):
    assert INTERLEAVED.count(old) == 1
    with pytest.raises(PlanError) as refused:
        read(INTERLEAVED.replace(old, new))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            "{layers: [0, 9], ministages: 2, domains: [{ranks: [0]}]}",
            "in a replica of one stage, whose parts",
        ),
        (
            "{layers: [0, 4], domains: [{ranks: [0]}]}\n  - {layers: [4, 9], domains: [{ranks: [1]}]}",
            "order is interleaved, of stages that run whole; give every stage two ministages or more",
        ),
        ("{domains: [{ranks: [0]}]}", "whose stage the job's pipeline repeats; give job.virtual_stages"),
    ],
)
def test_an_order_needs_stages_and_ministages(stages, says, read):
    with pytest.raises(PlanError) as refused:
        read(f"{INTERLEAVED.partition('  - ')[0]}  - {stages}\n")
    assert says in str(refused.value)
