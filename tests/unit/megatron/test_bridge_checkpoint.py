"""Weights that Megatron Bridge cannot import into stages that have layers of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hexi.megatron import bridge_checkpoint

(IMPORT,) = (one for one in bridge_checkpoint.BRIDGE_CHECKPOINT_PATCHES if "param_names" in one.target)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_moe_experts": 4}, "model.num_moe_experts 4"),
        ({"share_embeddings_and_output_weights": True}, "model.share_embeddings_and_output_weights True"),
        ({"num_moe_experts": None}, None),
    ],
)
def test_they_are_refused_by_name(
    fields: dict[str, Any],
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(bridge_checkpoint, "stages_active", lambda: True)
    names = IMPORT.build(lambda self, megatron_model: ["weight"])
    model = [SimpleNamespace(config=SimpleNamespace(**fields))]
    if named is None:
        assert names(None, model) == ["weight"]
        return
    with pytest.raises(SystemExit, match="2"):
        names(None, model)
    assert f"{named}: Bridge cannot import such weights" in capsys.readouterr().err
