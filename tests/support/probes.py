"""Measurements that nobody made: of devices and links whose true rates are known."""

from __future__ import annotations

from typing import Any

from megatron_hexi.probe.document import Measurement, Options, RankInfo, Series, TransferTimes

GPU = "Made-up GPU"


def rank_of(**fields: Any) -> RankInfo:
    """A rank on a CPU called `GPU`, with other fields as given."""
    usual: dict[str, Any] = {
        "host": "host",
        "group": "",
        "local_rank": 0,
        "kind": "cpu",
        "gpu": GPU,
        "memory_bytes": 8 * 2**30,
        "capability": (0, 0),
        "kernels": ("aten-cpu",),
        "versions": {"torch": "1.2.3"},
    }
    return RankInfo(**usual | fields)


def transfer(gb_s: float, alpha_s: float = 1e-4) -> TransferTimes:
    """Times of a link with that bandwidth."""
    sizes = tuple(10**6 * 4**i for i in range(5))
    return TransferTimes(sizes, tuple(alpha_s + size / (gb_s * 1e9) for size in sizes))


def measurement(ranks: list[RankInfo], speeds: list[float], **fields: Any) -> Measurement:
    """At 256, 1024 and 4096 every rank computes at 1, 2 and 3 times its speed (TFLOP/s), whatever it is."""
    sizes = (256, 1024, 4096)
    kernels = {kernel for rank in ranks for kernel in rank.kernels}
    names = [
        "matmul",
        *(f"{k} {m} {d}" for k in kernels for m in ("causal", "full") for d in ("forward", "backward")),
    ]
    curves = {
        name: Series(
            sizes,
            tuple(
                tuple(
                    speed * (i + 1) if name == "matmul" or name.split()[0] in rank.kernels else None
                    for i in range(3)
                )
                for rank, speed in zip(ranks, speeds, strict=True)
            ),
        )
        for name in names
    }
    usual: dict[str, Any] = {
        "options": Options(precision="fp32"),
        "curves": curves,
        "usable_bytes": (6 * 2**30,) * len(ranks),
        "stream_gb_s": (90.0,) * len(ranks),
    }
    return Measurement(version=1, started="2026-05-04", hexi="0.1.0", ranks=tuple(ranks), **usual | fields)
