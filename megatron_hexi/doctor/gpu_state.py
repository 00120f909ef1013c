"""The driver's settings of this machine's GPUs, from nvidia-smi."""

from __future__ import annotations

import re

from megatron_hexi.doctor.facts import GpuState
from megatron_hexi.errors import PlatformError
from megatron_hexi.external_tool import output_of

_QUERY = (
    "name",
    "persistence_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "power.limit",
    "power.default_limit",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
)
#: NVML's nvmlClocksEventReason… (nvml.h) that reduce clocks without a setting of the owner.
_SLOWED = {0x8: "hardware slowdown", 0x20: "software thermal limit", 0x40: "heat", 0x80: "power brake"}
_SECONDS = 20
_STATES = {"Enabled": True, "Disabled": False}


def find_gpu_states() -> tuple[GpuState, ...]:
    """Return the state of each GPU of the machine; empty without nvidia-smi.

    Raises:
        PlatformError: nvidia-smi fails, does not end, or reports a GPU that it cannot reach.
    """
    return read_states(_ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"))


def find_gpu_links() -> tuple[tuple[str, ...], ...]:
    """Return the links of each GPU to the GPUs of its node; empty without nvidia-smi.

    Raises:
        PlatformError: nvidia-smi fails, or does not end.
    """
    return read_links(_ask("topo", "-m"))


def _ask(*words: str) -> str:
    try:
        return output_of(("nvidia-smi", *words), _SECONDS)
    except FileNotFoundError:
        return ""


def read_states(states: str) -> tuple[GpuState, ...]:
    """Return the states in nvidia-smi's rows of `_QUERY`, separated by commas.

    Raises:
        PlatformError: a line is no such row, as of a GPU that fell off the bus.
    """
    gpu_states = []
    for line in filter(None, map(str.strip, states.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY):
            raise PlatformError(f"{line[:200]} (printed by `nvidia-smi --query-gpu`)")
        name, persistence, ecc, mig, limit, default, clock, reasons = fields
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        gpu_states.append(
            GpuState(
                name,
                _STATES.get(persistence),
                _STATES.get(ecc),
                _STATES.get(mig),
                _number(limit),
                _number(default),
                None if (found_clock := _number(clock)) is None else int(found_clock),
                tuple(reason for bit, reason in _SLOWED.items() if bits & bit),
            )
        )
    return tuple(gpu_states)


def read_links(topology: str) -> tuple[tuple[str, ...], ...]:
    """Return each GPU's links to the GPUs of its node, from the matrix of ``nvidia-smi topo -m``."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    return tuple(
        tuple(words[1 : 1 + count])
        for words in lines
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words
    )


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
