"""New values start in the order of the forward pass, and each bucket is waited for once, when it is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hexi.runtime.piece_buffers import ValueBroadcast


def a_bucket(name: str, seen: list[str], *, passes: bool = False) -> Any:
    """A bucket of two elements of which ranks 0 and 1 own one each."""
    return SimpleNamespace(
        passes=passes,
        values=torch.zeros(2),
        group=name,
        runs=lambda: [(0, slice(0, 1)), (1, slice(1, 2))],
        spread=lambda: seen.append(f"spread {name}"),
    )


def test_values_start_in_forward_order_and_are_waited_for_when_read(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def broadcast(values: torch.Tensor, owner: int, group: str, async_op: bool) -> Any:
        assert async_op
        seen.append(f"start {group} {owner}")
        return SimpleNamespace(wait=lambda: seen.append(f"wait {group} {owner}"))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    last, first = a_bucket("last", seen), a_bucket("first", seen)  # as the backward pass completes them
    away = a_bucket("away", seen, passes=True)
    values = ValueBroadcast([last, away, first], lambda buffer: seen.append(f"renew {buffer.group}"))
    values.start()
    assert seen == ["start first 0", "start first 1", "renew away", "start last 0", "start last 1"]
    assert values.under_way == 2
    seen.clear()
    values.settle([first])
    values.settle([first])
    assert seen == ["wait first 0", "wait first 1", "spread first"]
    assert values.under_way == 1
    seen.clear()
    values.start()  # an iteration in which the last did not run
    assert seen[:3] == ["wait last 0", "wait last 1", "spread last"]
    assert seen[3] == "start first 0"
    alone = a_bucket("alone", seen)
    alone.group = None
    seen.clear()
    values = ValueBroadcast([alone], renew=lambda _: None)
    values.start()
    values.settle([alone])
    assert seen == ["spread alone"]
