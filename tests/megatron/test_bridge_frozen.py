"""Frozen encoders of images in the cost model, against what Megatron Bridge freezes and its layers keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hexi.cost.encoder_bytes import encoder_bytes
from megatron_hexi.cost.memory import part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.models import Images, Job, read_model
from tests.megatron import bridge_emulated
from tests.megatron.launch import launch

pytestmark = pytest.mark.skipif(
    not bridge_emulated.is_available(), reason="Megatron Bridge is not unpacked; see scripts/bootstrap.sh"
)

RANK = 4
#: Fields of Bridge's models by case.
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "model": {"freeze_vision_model": True},
    "projection": {"freeze_vision_projection": True},
    "both": {"freeze_vision_model": True, "freeze_vision_projection": True},
    "lora": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("frozen")
    script = Path(__file__).parent / "bridge_frozen.py"
    for ranks in (1, 2):
        ended = launch(out, ranks=ranks, args=[script, out], entry="tests.megatron.bridge_models_run")
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return out


def of_bridge(folder: Path, kind: str, width: int) -> dict[str, tuple[int, int, int]]:
    """Trained and frozen weights and bytes kept, by case, on a rank of a unit of this width."""
    found: Any = json.loads((folder / f"frozen-{width}.json").read_text())[kind]
    return found


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", ["vision", "vision3", "vision3e"])
def test_weights_of_a_rank_are_those_that_bridge_has_and_freezes(folder: Path, kind: str, width: int):
    model = read_model(folder / kind.removesuffix("e"))  # whose encoder is the same
    assert model.vision is not None
    kept, counted = {}, {}
    for case, (trained, frozen, size) in of_bridge(folder, kind, width).items():
        images = Images(1, 16, **CASES[case])
        job = Job(model, 64, precision="fp32", tensor_parallel=width, images=images)
        job = replace(job, lora_rank=RANK if case == "lora" else 0)
        text = replace(job, images=None)
        if case == "lora" and width > 1:  # adapters count by their part of all weights
            continue
        if case == "lora":
            check_adapters(job, trained, frozen, size)
            continue
        assert params(job, trained=True) - params(text, trained=True) == trained
        assert params(job, trained=False) - params(text, trained=False) == trained + frozen
        own = encoder_bytes(job, np.ones(1))
        kept[case], counted[case] = size, float(own.kept(model.vision.layers, 0, 1)[0] - own.once[0])
    assert kept["both"] == counted["both"] == 0
    # Features are counted too, which encoders return but do not keep, and inputs that two projectors share.
    assert {1: 0.8, 2: 0.75}[width] * counted["model"] < kept["model"] < counted["model"]
    # Megatron's layers and transformers' keep a little more of projectors that are trained.
    assert kept["whole"] - kept["projection"] >= counted["whole"] - counted["projection"] > 0


@pytest.mark.parametrize("kind", ["vision", "vision3", "vision3e"])
def test_ranks_of_a_unit_divide_the_encoders_of_qwen3_vl_alone(folder: Path, kind: str):
    whole, divided = (sum(of_bridge(folder, kind, width)["whole"][:2]) for width in (1, 2))
    assert divided == whole if kind == "vision" else divided < 0.7 * whole


def check_adapters(job: Job, adapters: int, frozen: int, kept: int) -> None:
    model, text = job.model, replace(job, images=None)
    assert frozen == sum(model.encoder_params())
    whole = model.total_params + frozen * (model.encoder_columns > 0)
    found = job.trained_share * whole - text.trained_share * model.total_params
    assert found == pytest.approx(adapters, abs=1e-6)
    assert (adapters > 0) == all(job.trained_vision) == (kept > 0)


def params(job: Job, trained: bool) -> int:
    first = ModelPart(layers=job.model.layers, again=0, is_first=True, is_last=True, ahead=1)
    return int(part_params(job, first, trained=trained))
