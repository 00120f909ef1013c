"""The driver's settings of this machine's GPUs, from nvidia-smi."""

from __future__ import annotations

import re
import subprocess

from megatron_hexi.doctor.facts import GpuState

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
        subprocess.SubprocessError: nvidia-smi fails, or does not end.
    """
    try:
        states = _ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return ()
    return read_states(states, _ask("topo", "-m"))


def _ask(*words: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *words], check=True, capture_output=True, text=True, timeout=_SECONDS
    ).stdout


def read_states(states: str, topology: str) -> tuple[GpuState, ...]:
    """Return the states in nvidia-smi's output.

    Args:
        states: rows of `_QUERY`, separated by commas.
        topology: output of ``nvidia-smi topo -m``.
    """
    links = read_links(topology)
    gpu_states = []
    for number, line in enumerate(filter(None, map(str.strip, states.splitlines()))):
        name, persistence, ecc, mig, limit, default, clock, reasons = map(str.strip, line.split(","))
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
                links.get(number, ()),
            )
        )
    return tuple(gpu_states)


def read_links(topology: str) -> dict[int, tuple[str, ...]]:
    """Return each GPU's links to the GPUs of its node, from the matrix of ``nvidia-smi topo -m``."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    return {
        int(words[0][3:]): tuple(words[1 : 1 + count])
        for words in lines
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words
    }


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
