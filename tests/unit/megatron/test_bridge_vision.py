"""Vision in Megatron Bridge's loop: what a plan does not carry out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
