"""When agents start their ranks again for nodes that wait or are lost, and when ranks are told instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from megatron_hexi.elastic.launcher.rendezvous import PatientRendezvous
from megatron_hexi.elastic.store import BROKEN, TRAINING, WANTED


@pytest.fixture
def rendezvous(monkeypatch):
    def make(
        waiting: int, keys: tuple[str, ...], is_full: bool = False, lost: int = 0, closed: str | None = None
    ) -> PatientRendezvous:
        monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lambda _: waiting)
        patient = PatientRendezvous.__new__(PatientRendezvous)
        patient.round = dist.HashStore()
        for key in keys:
            patient.round.set(key, "")
        patient.is_full = is_full
        patient.life = cast(Any, SimpleNamespace(count_lost=lambda: lost))
        patient.fence = cast(Any, SimpleNamespace(why_closed=lambda: closed))
        return patient

    return make


@pytest.mark.parametrize(
    ("waiting", "keys", "is_full", "lost", "expected"),
    [
        pytest.param(0, (), False, 0, 0, id="all are there and start"),
        pytest.param(2, (), False, 0, 2, id="nodes come while ranks start"),
        pytest.param(2, (TRAINING,), False, 0, 0, id="nodes come while ranks train"),
        pytest.param(1, (), True, 0, 0, id="no room, ranks start"),
        pytest.param(1, (TRAINING,), True, 0, 0, id="no room, ranks train"),
        pytest.param(0, (), True, 1, 1, id="a node is lost while ranks start"),
        pytest.param(2, (), True, 1, 1, id="a node is lost and a spare has come"),
        pytest.param(0, (TRAINING,), True, 1, 0, id="a node is lost while ranks train: they see it"),
        pytest.param(1, (TRAINING, BROKEN), True, 0, 1, id="others have ended their ranks"),
        pytest.param(1, (BROKEN,), True, 0, 1, id="others have ended their ranks that started"),
    ],
)
def test_what_ranks_are_started_again_for(rendezvous, waiting, keys, is_full, lost, expected):
    assert rendezvous(waiting, keys, is_full, lost).num_nodes_waiting() == expected


@pytest.mark.parametrize(("is_full", "lost", "told"), [(False, 0, b"3"), (True, 0, None), (True, 1, b"1")])
def test_ranks_that_train_are_told_of_nodes_for_which_there_is_room(rendezvous, is_full, lost, told):
    patient = rendezvous(3, (TRAINING,), is_full, lost)
    assert patient.num_nodes_waiting() == 0
    assert patient.round is not None
    assert patient.round.check([WANTED]) == (told is not None)
    assert told is None or patient.round.get(WANTED) == told


def test_ranks_of_a_round_that_is_over_are_started_again(rendezvous, capsys):
    assert rendezvous(0, (TRAINING,), closed="it is over").num_nodes_waiting() == 1
    assert "it is over. This node's ranks end" in capsys.readouterr().err
