"""Fields of Megatron's model: those with another name than their argument, and defaults without an option."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: Arguments of Megatron by the field of a model's configuration that has another name for them.
ARGUMENTS: Final = {
    "num_moe_experts": "num_experts",
    "use_te_rng_tracker": "te_rng_tracker",
    "bias_activation_fusion": "bias_swiglu_fusion",
}
DATA = Path(__file__).parent / "data" / "model_defaults.json"


@functools.cache
def model_defaults() -> Mapping[str, Any]:
    """Return the recorded defaults by field; a field that is absent has ``None``, or an option."""
    defaults: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return defaults
