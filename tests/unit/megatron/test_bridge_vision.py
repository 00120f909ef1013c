"""Vision in Megatron Bridge's loop: what a plan does not carry out."""

from __future__ import annotations

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
MINISTAGES = STAGES.replace("], domains", "], ministages: 1, domains")
PIPELINE = "- stages:\n  - domains: [{ranks: [0]}]\n"
LACKS = "plan.yaml: the first stage of replicas[{}] has 1 of the {} layers that add features of images"


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"plan": MINISTAGES}, "plan.yaml: its stages run in ministages, which do not run an encoder"),
        ({"plan": STAGES, "further": [0, 1]}, LACKS.format(1, 2)),
        ({"model": {"pipeline_model_parallel_size": 4}, "further": [0, 1, 3]}, LACKS.format(0, 3)),
        ({"model": {"pipeline_model_parallel_size": 2}, "further": [0, 1]}, None),
        ({"plan": STAGES, "further": [5]}, None),
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
    vision = {"deepstack_visual_indexes": job["further"]} if "further" in job else {}
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
