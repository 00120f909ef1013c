"""Vision in Megatron Bridge's loop: what a plan does not carry out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron import bridge_vision
from megatron_hexi.plan import plan_from_yaml
from megatron_hexi.yaml_file import yaml_from_text

HEADER = "version: 2\nworkload: {seq_length: 8, heads: 2, kv_heads: 2, head_dim: 4, layers: 4}\nreplicas:\n"
STAGES = """\
- stages:
  - {layers: [0, 2], domains: [{ranks: [0]}]}
  - {layers: [2, 4], domains: [{ranks: [1]}]}
- stages:
  - {layers: [0, 1], domains: [{ranks: [2]}]}
  - {layers: [1, 4], domains: [{ranks: [3]}]}
"""
MINISTAGES = """\
- stages:
  - {layers: [0, 4], ministages: [1, 3], domains: [{ranks: [0]}]}
"""
UNIT = """\
- stages:
  - layers: [0, 4]
    domains: [{groups: [{segments: [[0, 8]], members: [{ranks: [0, 1], tokens: 8, heads: [0, 1]}]}]}]
"""
PIPELINE = "- stages:\n  - domains: [{ranks: [0]}]\n"
LACKS = "plan.yaml: the first stage of replicas[{}] has {} of the {} layers that add features of images"


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"plan": MINISTAGES}, None),
        ({"plan": MINISTAGES, "further": [0, 1]}, LACKS.replace("stage", "ministage").format(0, 1, 2)),
        ({"plan": STAGES, "further": [0, 1]}, LACKS.format(1, 1, 2)),
        ({"model": {"pipeline_model_parallel_size": 4}, "further": [0, 1, 3]}, LACKS.format(0, 1, 3)),
        ({"model": {"pipeline_model_parallel_size": 2}, "further": [0, 1]}, None),
        ({"plan": STAGES, "further": [5]}, None),
        (
            {"plan": UNIT, "further": [0], "heads": 3},
            "plan.yaml: units of the first stage of replicas[0] have 2 ranks, which do not divide the",
        ),
        ({"plan": UNIT, "further": [0], "heads": 4}, None),
        ({"plan": UNIT, "heads": 3}, None),
        ({"plan": STAGES}, None),
        (
            {"model": {"virtual_pipeline_model_parallel_size": 2}, "further": [0]},
            "model.virtual_pipeline_model_parallel_size 2",
        ),
        ({"model": {"virtual_pipeline_model_parallel_size": 2}}, None),
    ],
)
def test_it_is_refused_by_name(job: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch):
    plan = plan_from_yaml(yaml_from_text(Path("plan.yaml"), HEADER + job.get("plan", PIPELINE)))
    given = SimpleNamespace(path="plan.yaml", plan=plan)
    monkeypatch.setattr(bridge_vision, "given_plan", lambda: given)
    vision = {"num_heads": job.get("heads", 2)}
    vision |= {"deepstack_visual_indexes": job["further"]} if "further" in job else {}
    model = {"pipeline_model_parallel_size": 1, "num_layers": 4, "vision_config": SimpleNamespace(**vision)}
    model |= {"virtual_pipeline_model_parallel_size": None} | job.get("model", {})
    config = SimpleNamespace(model=SimpleNamespace(**model))
    if named is None:
        bridge_vision.refuse_vision(config)
        return
    with pytest.raises(HexiError) as problem:
        bridge_vision.refuse_vision(config)
    assert str(problem.value).startswith(named)
    assert "; " in str(problem.value)  # a remedy


def test_a_batch_that_is_read_again_keeps_its_images_where_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bridge_vision, "active_session", lambda: SimpleNamespace(seq_length=8))
    for name in ("whole_sequences", "cut_batch"):
        monkeypatch.setattr(bridge_vision, name, lambda sample, _: sample)
    images = SimpleNamespace(pixel_values="on the host")

    def as_bridge_moves_them(batches: Iterator[dict[str, Any]]) -> Any:
        moved = next(batches)["visual_inputs"]
        moved.pixel_values = "on the device"
        return moved

    read = bridge_vision.BRIDGE_VISION_PATCHES[1].build(as_bridge_moves_them)
    batch = {"input_ids": None, "visual_inputs": images}
    assert read(iter([batch])).pixel_values == "on the device"
    assert images.pixel_values == "on the host"
