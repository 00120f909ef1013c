"""What a plan does not carry out beside vision in Megatron Bridge's loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron import bridge_vision


class LoRA:
    """Bridge's, by name."""


@pytest.mark.parametrize(
    ("peft", "packs", "mesh", "named"),
    [
        (LoRA(), False, None, "peft LoRA: adapters of a model with vision"),
        (None, True, None, "dataset.enable_in_batch_packing True: "),
        (None, False, "units", "plan.yaml: its stages have layers of their own"),
        (None, False, None, None),
    ],
)
def test_it_is_refused_by_name(
    peft: Any, packs: bool, mesh: str | None, named: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bridge_vision, "given_plan", lambda: SimpleNamespace(path="plan.yaml", mesh=mesh))
    config = SimpleNamespace(peft=peft, dataset=SimpleNamespace(enable_in_batch_packing=packs))
    if named is None:
        bridge_vision.refuse_vision(config)
        return
    with pytest.raises(HexiError) as problem:
        bridge_vision.refuse_vision(config)
    assert str(problem.value).startswith(named)
    assert "; " in str(problem.value)  # a remedy
