"""Defaults of the fields of Megatron's model that no option sets, recorded in data/model_defaults.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "model_defaults.json"


@functools.cache
def model_defaults() -> Mapping[str, Any]:
    """Return the defaults by field; a field that is absent has ``None``, or an option."""
    defaults: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return defaults
