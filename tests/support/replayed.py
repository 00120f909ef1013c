"""Bytes that units sent in a replay of the simulator."""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.simulator.replay import Replay


def sent_bytes(replay: Replay, phase: str, received: bool = False) -> Floats:
    """Return bytes that each unit sent (or received) in batches of a phase, [passes, U]."""
    program = replay.program
    unit_bytes = np.zeros((len(replay.laps), len(program.units)))
    ends = program.dst if received else program.src
    for number, (batch, _) in enumerate(program.batches):
        if batch.phase == phase and np.isfinite(replay.log.arrived[number]):
            unit_bytes[batch.lap, ends[number]] += program.size[number]
    return unit_bytes
