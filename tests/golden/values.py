"""Values as JSON that keeps every bit of a float, and the differences between two sets of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "values"


def plain(value: Any) -> Any:
    """A value as lists, strings and integers; floats as `float.hex` spells them, dataclasses by position."""
    if is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, float) else value


def digest(value: Any) -> str:
    """The first 64 bits of the SHA-256 of a value's plain form, in hexadecimal."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(part: str) -> dict[str, Any]:
    """The golden values of a part by case; none if they were never written."""
    path = FOLDER / f"{part}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(part: str, values: dict[str, Any]) -> None:
    """Write the golden values of a part, a line for each case."""
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(values.items()))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(golden: Any, found: Any, relative: float, place: str = "") -> Iterator[str]:
    """The places in which two plain values differ, with both values.

    Args:
        golden: the value as it should be.
        found: the value as it is.
        relative: the relative difference that two floats may have.
        place: where in the case they stand.
    """
    if isinstance(golden, dict) and isinstance(found, dict) and golden.keys() == found.keys():
        for key in golden:
            yield from differences(golden[key], found[key], relative, f"{place}.{key}")
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for number, (one, other) in enumerate(zip(golden, found, strict=True)):
            yield from differences(one, other, relative, f"{place}[{number}]")
    elif golden != found:
        before, now = _float(golden), _float(found)
        if before is None or now is None:
            yield f"{place}: {golden} is now {found}"
        elif not math.isclose(before, now, rel_tol=relative, abs_tol=0.0):
            yield f"{place}: {before!r} is now {now!r} ({abs(now - before) / abs(before or 1):.1e})"


def _float(value: Any) -> float | None:
    if not isinstance(value, str) or "0x" not in value:
        return None
    return float.fromhex(value)
