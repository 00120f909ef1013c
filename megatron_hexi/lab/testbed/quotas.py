"""Unequal speeds by quotas of processor time (besides pacing), and the load that measures them.

Every rank has a control group and is pinned to a core. The scheduler stops it when its share of a period is
used up, whatever it computes. Shares are in proportion to the devices' speeds: a quota knows ratios only. A
rank that is stopped finds the caches cold, the more often the smaller its share: so small shares are worth
less than their part, and all are corrected once by the speeds that were measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost.compute import ATTENTION_BACKWARD
from megatron_hexi.errors import PlatformError
from megatron_hexi.lab.testbed.lab import Quota

#: The kernel whose curves a device must have: what ``--hexi-platform cpu`` computes attention with.
KERNEL = "aten-cpu"
#: A linear layer [width, width] and causal attention, forward and backward, on so many tokens. Heads are
#: those of the curves.
TOKENS, WIDTH, HEADS, HEAD_DIM = 256, 512, 2, 128


def cycle_seconds(device: Device) -> float:
    """Return the seconds of one cycle in fp32 by the device's curves."""
    product = 2 * TOKENS * WIDTH**2
    attention = 4 * HEADS * HEAD_DIM * TOKENS**2 / 2
    causal = device.attention(KERNEL).causal
    forward = device.layer_matmul.time(product, TOKENS) + causal.forward.time(attention, TOKENS)
    backward = 2 * device.layer_matmul.time(product, TOKENS) + causal.backward.time(
        ATTENTION_BACKWARD * attention, TOKENS
    )
    return (forward + backward) / fp32_factor(device)


def fp32_factor(device: Device) -> float:
    """Return the ratio of fp32 to 16-bit rates by datasheet; 1 where the device lacks either."""
    half, single = device.nominal.bf16 or device.nominal.fp16, device.nominal.fp32
    return single / half if half and single else 1.0


#: Longer periods make single operations vary by 25 to 40 %.
_PERIOD_US = 10_000
#: The kernel grants no less a period.
_LEAST_US = 1_000
#: Of a core, for all of its ranks together; the rest is for torchrun, the links and the system.
_USABLE = 0.85
#: Of all ranks, where an ordinary process has 1.
_WEIGHT = 50
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def assign_shares(cluster: Cluster, cores: Sequence[int]) -> list[tuple[int, float]]:
    """Return a core and a share of it for each rank: the largest first, each to the least loaded core."""
    speeds = [1 / cycle_seconds(rank.device) for rank in cluster.ranks]
    load = dict.fromkeys(cores, 0.0)
    core_of: dict[int, int] = {}
    for rank in sorted(range(len(speeds)), key=lambda rank: -speeds[rank]):
        core_of[rank] = min(load, key=lambda core: load[core])
        load[core_of[rank]] += speeds[rank]
    unit = _USABLE / max(load.values())
    if unit * min(speeds) * _PERIOD_US < _LEAST_US:
        raise PlatformError(
            f"--speeds quota: the slowest rank would get {unit * min(speeds):.1%} of a core, and the kernel "
            f"grants {_LEAST_US / _PERIOD_US:.0%} at least; take fewer or more equal ranks, or --speeds paced"
        )
    return [(core_of[rank], unit * speed) for rank, speed in enumerate(speeds)]


def correct_shares(quotas: Sequence[Quota], speeds: Mapping[int, float]) -> tuple[Quota, ...]:
    """Return quotas raised for ranks that were too slow and lowered for others; they take effect at once.

    Args:
        speeds: measured over requested speed, by number of the GPU.
    """
    shares = [quota.share / speeds.get(gpu, 1.0) for gpu, quota in enumerate(quotas)]
    load: dict[int, float] = {}
    for quota, share in zip(quotas, shares, strict=True):
        load[quota.core] = load.get(quota.core, 0.0) + share
    unit = _USABLE / max(load.values())
    corrected = tuple(replace(quota, share=unit * share) for quota, share in zip(quotas, shares, strict=True))
    for quota in corrected:
        _limit(quota)
    return corrected


@contextmanager
def rank_quotas(cluster: Cluster) -> Iterator[tuple[Quota, ...]]:
    """Yield each rank's quota of processor time; the control groups are removed even if we are killed."""
    shares = assign_shares(cluster, sorted(os.sched_getaffinity(0)))
    root = (_V1 if _is_v1() else _V2) / f"hexi-testbed-{os.getpid()}"
    # In a session of its own, so that what ends us leaves it alone; it ends when our end of the pipe closes.
    guard = subprocess.Popen(
        [sys.executable, "-m", "megatron_hexi.lab.testbed.guard", root],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        try:
            _make_root(root)
            yield tuple(_make(root, rank, *share) for rank, share in enumerate(shares))
        except OSError as problem:
            if not str(problem.filename).startswith(str(_V2)):
                raise
            raise PlatformError(
                f"--speeds quota: {problem.filename}: {problem.strerror}; quotas need root and the cpu "
                "controller; take --speeds paced"
            ) from None
    finally:
        guard.communicate()


def _make_root(root: Path) -> None:
    """Create the control group of all ranks, with a weight that keeps other processes off their cores."""
    root.mkdir()
    if _is_v1():
        (root / "cpu.shares").write_text(str(_WEIGHT * 1024))
    else:
        for parent in (root.parent, root):
            (parent / "cgroup.subtree_control").write_text("+cpu")
        (root / "cpu.weight").write_text(str(_WEIGHT * 100))


def _make(root: Path, rank: int, core: int, share: float) -> Quota:
    quota = Quota(str(root / f"rank-{rank}"), core, share)
    Path(quota.cgroup).mkdir()
    _limit(quota)
    return quota


def _limit(quota: Quota) -> None:
    folder, time_us = Path(quota.cgroup), max(_LEAST_US, round(quota.share * _PERIOD_US))
    if _is_v1():
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(time_us))
    else:
        (folder / "cpu.max").write_text(f"{time_us} {_PERIOD_US}")


def _is_v1() -> bool:
    return (_V1 / "cgroup.procs").exists()
