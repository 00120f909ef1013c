"""A loss that jumps after a swap rolls the swap back; one that does not leaves it."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hexi.errors import HexiError
from megatron_hexi.replan.training import replanning
from megatron_hexi.replan.training.replanning import Replanner


class Scripted:
    """A planner that wants a swap at its first answer."""

    def __init__(self, opening: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []

    def ask(self, document: dict[str, Any]) -> None:
        self.asked.append(document)

    def hear(self) -> dict[str, Any] | None:
        return self.answers.pop(0) if self.answers else None


@pytest.fixture
def leader():
    with (
        mock.patch.multiple(dist, get_rank=lambda: 0, get_world_size=lambda: 2),
        mock.patch.multiple(Replanner, _opening=lambda self: {}, _present=lambda self: "the plan before"),
    ):
        yield Replanner(dist.HashStore(), Namespace(hexi_replan_interval=5), Scripted)


def report(leader: Replanner, iteration: int, losses: list[float]) -> None:
    """Both ranks have posted their times; the second knows the losses; rank 0 looks at them."""
    for rank, known in ((0, []), (1, losses)):
        document = {"iteration": iteration, "busy_s": [1.0, 2.0, 3.0], "losses": known}
        leader._store.set(f"times/{iteration}/{rank}", json.dumps(document))
    leader._iteration = iteration + 1
    leader._lead(iteration + 1)


def swap(leader: Replanner, capsys: pytest.CaptureFixture[str]) -> None:
    advice = {"iteration": 5, "speeds": [1.0, 0.5], "changed": [1], "present_s": 2.0, "best_s": 1.0}
    assert leader._advice is not None
    leader._advice.answers.append(advice | {"gain": 0.5, "reason": "gain", "plan": "new", "digest": "d" * 64})
    leader._lead(7)
    assert json.loads(leader._store.get("order/0"))["plan"] == "new"
    assert "changed: rank 1" in capsys.readouterr().err
    leader._orders = 1


@pytest.mark.parametrize("after", [[2.0, 1.9, 9.0], [2.0, math.nan], [math.inf]])
def test_a_jump_orders_the_plan_before_and_no_other(leader, capsys, after):
    report(leader, 5, [2.3, 2.2, 2.1, 2.15, 2.05])
    assert leader._advice.asked[0]["busy_s"] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    swap(leader, capsys)
    report(leader, 10, after)
    order = json.loads(leader._store.get("order/1"))
    assert (order["plan"], order["final"], order["iteration"]) == ("the plan before", True, 13)
    assert "the loss jumped" in capsys.readouterr().err
    report(leader, 15, [2.0])
    assert len(leader._advice.asked) == 1


@pytest.mark.parametrize("after", [[2.0, 2.3, 1.9], [1.0, 0.5]])
def test_a_usual_loss_keeps_the_swap(leader, capsys, after):
    report(leader, 5, [2.3, 2.2, 2.1, 2.15, 2.05])
    swap(leader, capsys)
    report(leader, 10, after)
    assert not leader._store.check(["order/1"])
    assert len(leader._advice.asked) == 2


def test_a_jump_without_a_swap_is_none_of_ours(leader):
    report(leader, 5, [2.3, 2.2, 2.1, 2.15, 2.05])
    report(leader, 10, [9.0])
    assert not leader._store.check(["order/0"])


def test_a_rank_that_missed_a_swap_says_so(leader):
    order = replanning.Order(0, 7, "plan")
    with (
        mock.patch.object(replanning, "active_session", return_value=object()),
        pytest.raises(HexiError, match="due at iteration 7, this rank is at 8"),
    ):
        leader._carry_out(8, order)
