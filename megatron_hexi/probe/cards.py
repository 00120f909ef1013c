"""The InfiniBand and RoCE cards of this host, from the kernel's sysfs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_hexi.doctor.facts import InfinibandPort
from megatron_hexi.probe.document import HostCards

#: What the kernel calls a link layer.
_FABRICS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


def find_cards(ports: Sequence[InfinibandPort], environment: Mapping[str, str]) -> HostCards | None:
    """Return the fastest kind of cards that are up; of equally fast kinds the more numerous.

    Hosts often have slower cards besides, for storage.

    Args:
        ports: ports of the host.
        environment: NCCL_IB_DISABLE=1 leaves NCCL to TCP.
    """
    if environment.get("NCCL_IB_DISABLE") == "1":
        return None
    counts: Counter[tuple[str, float]] = Counter()
    for port in ports:
        rate = re.match(r"([0-9.]+) Gb/sec", port.rate)
        if port.state == "ACTIVE" and port.link_layer in _FABRICS and rate is not None:
            counts[_FABRICS[port.link_layer], float(rate[1])] += 1
    if not counts:
        return None
    fabric, gbit_s = max(counts, key=lambda kind: (kind[1], counts[kind], kind[0]))
    return HostCards(fabric, counts[fabric, gbit_s], gbit_s)
