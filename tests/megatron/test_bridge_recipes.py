"""Recipes of Megatron Bridge for models with vision pass a plan's checks, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron import bridge_emulated
from tests.megatron.launch import launch

#: What refuses a recipe, by words of its name.
REFUSED = {
    "energon": "dataset EnergonDatasetConfig: a plan needs a DirectHFSFTDatasetConfig",
    "a3b_peft": "peft.target_modules linear_fc1: experts hold this layer",
    "a22b_peft": "peft.target_modules linear_fc1: experts hold this layer",
}

pytestmark = pytest.mark.skipif(
    not bridge_emulated.is_available(), reason="Megatron Bridge is not unpacked; see scripts/bootstrap.sh"
)


@pytest.mark.slow
def test_recipes_pass_or_are_refused_by_name(tmp_path: Path):
    script = Path(__file__).parent / "bridge_recipes.py"
    ended = launch(tmp_path, ranks=2, args=[script, tmp_path], entry="tests.megatron.bridge_models_run")
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found = json.loads((tmp_path / "0" / "found.json").read_text())
    assert len(found) == 18
    for name, refused in found.items():
        expected = next((words for part, words in REFUSED.items() if part in name), None)
        assert refused.startswith(expected) if expected else not refused, (name, refused)
