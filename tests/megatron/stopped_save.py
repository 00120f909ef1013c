"""A training script that stops before a complete checkpoint is moved to its place, if a file says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron_hexi.elastic.training import fencing
from tests.megatron import paced

#: In the working directory; removed by the rank that stops.
STOP = Path("stop")


def _stop_before_publishing(begun: Path, target: Path, publish=fencing.publish) -> None:
    if STOP.exists():
        STOP.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    publish(begun, target)


if __name__ == "__main__":
    fencing.publish = _stop_before_publishing
    paced.main()
