"""Layers of stages that are alike are timed once, and as those of other stages."""

import pytest

from megatron_hexi.cost import CostModel, known_layers
from megatron_hexi.cost.layer import layer_times
from megatron_hexi.cost.recent import Recent
from tests.support.costs import cluster, tiny_job
from tests.unit.cost.test_kinds import model, staged


@pytest.mark.parametrize(("devices", "timed"), [("PLAIN PLAIN PLAIN", 1), ("PLAIN DOUBLE PLAIN", 2)])
def test_a_layer_of_stages_that_are_alike_is_timed_once(monkeypatch, devices, timed):
    calls = []

    def counted(*arguments):
        calls.append(layer_times(*arguments))
        return calls[-1]

    monkeypatch.setattr(known_layers, "layer_times", counted)
    nodes = cluster([(name, device, 2) for name, device in zip("abc", devices.split(), strict=True)])
    job = tiny_job(model=model(6), global_batch_size=4)
    costs = CostModel(job, nodes)
    timings = [costs.timing(staged(job, cuts)) for cuts in ((0, 2, 4, 6), (0, 1, 3, 6))]
    assert len(calls) == timed
    alone = CostModel(job, nodes).timing(staged(job, (0, 1, 3, 6)))
    assert timings[1].phases == alone.phases


def test_the_results_asked_for_last_are_kept():
    kept, made = Recent[int](2), []

    def ask(name):
        def make():
            made.append(name)
            return len(made)

        return kept.of(name, make)

    assert [ask(name) for name in "abacab"] == [1, 2, 1, 3, 1, 4]
    assert made == list("abcb")
