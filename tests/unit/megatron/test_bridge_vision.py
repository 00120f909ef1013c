"""Vision in Megatron Bridge's loop: what a plan does not carry out, and features at a rank's rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron import bridge_vision


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"packs": True}, "dataset.enable_in_batch_packing True: "),
        ({"mesh": "units"}, "plan.yaml: its stages have layers of their own"),
        ({"model": {"vision_dp_when_cp": True}}, "model.vision_dp_when_cp True: "),
        ({"model": {"dist_train": SimpleNamespace(use_dist_train=True)}}, "model.dist_train.use_dist_train"),
        ({}, None),
    ],
)
def test_it_is_refused_by_name(job: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch):
    given = SimpleNamespace(path="plan.yaml", mesh=job.get("mesh"))
    monkeypatch.setattr(bridge_vision, "given_plan", lambda: given)
    config = SimpleNamespace(
        dataset=SimpleNamespace(enable_in_batch_packing=job.get("packs", False)),
        model=SimpleNamespace(**job.get("model", {})),
    )
    if named is None:
        bridge_vision.refuse_vision(config)
        return
    with pytest.raises(HexiError) as problem:
        bridge_vision.refuse_vision(config)
    assert str(problem.value).startswith(named)
    assert "; " in str(problem.value)  # a remedy


def test_features_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    positions = torch.tensor([7, 8, 9, 0, 1, 5, 0])  # two runs of rows, and one of padding
    session = SimpleNamespace(shard=SimpleNamespace(positions=positions))
    monkeypatch.setattr(bridge_vision, "active_session", lambda: session)
    (patch,) = (one for one in bridge_vision.BRIDGE_VISION_PATCHES if "deepstack" in one.target)
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 10, generator=random) < 0.6
    features = [torch.randn(int(mask.sum()), 3, generator=random) for _ in range(2)]
    own, found = patch.build(None)(mask, features, cp_size=2, cp_rank=1)
    for whole, part in zip(features, found, strict=True):
        added = torch.zeros(2, 10, 3)
        added[mask] = whole
        rows = torch.zeros(2, 7, 3)
        rows[own] = part
        torch.testing.assert_close(rows, added[:, positions], rtol=0, atol=0)
