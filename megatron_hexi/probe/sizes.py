"""Sizes to measure at, the FLOPs that each counts, and time limits."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.cost.compute import ATTENTION_BACKWARD
from megatron_hexi.probe.document import Options

KIB, MIB = 2**10, 2**20

#: Parts of the budget: the curves', and the links'.
CURVES_SHARE, LINKS_SHARE = 0.6, 0.3
#: No point of a curve takes much longer, so that ranks that wait for another know when it is lost.
LONGEST_POINT_S = 20.0
#: Width of the MLP over the hidden size, in the matrix that is measured.
WIDENING = 4

MASKS = ("causal", "full")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure at on one rank.

    Args:
        hidden: the weight is [4 hidden, hidden].
        stream_bytes: bytes of each of the three arrays of the memory stream, well beyond any cache.
        largest_message: bytes from one rank to another.
        host_stream_bytes: the same of the host's memory.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: int
    heads: int
    head_dim: int
    stream_bytes: int
    largest_message: int
    host_stream_bytes: int = 64 * MIB

    def matmul_flops(self, rows: int) -> float:
        """Return the FLOPs of a weight's three products in training: output and both gradients."""
        return 3 * 2.0 * rows * WIDENING * self.hidden**2

    def attention_flops(self, mask: str, direction: str, tokens: int) -> float:
        """Return FLOPs of attention as curves count them: causal half of full, backward 2.5 times forward."""
        area = tokens**2 / 2 if mask == "causal" else tokens**2
        factor = ATTENTION_BACKWARD if direction == "backward" else 1.0
        return factor * 4.0 * self.heads * self.head_dim * area


def sizes_for(options: Options, kind: str) -> Sizes:
    """Return sizes for a GPU (``cuda``) or a CPU, which is a hundred times slower."""
    gpu = kind == "cuda"
    step = 4 if options.quick else 2
    least_rows, least_tokens = (256, 512) if gpu else (64, 256)
    most_rows, most_tokens = (16384, 131072) if gpu else (1024, 4096) if options.quick else (4096, 16384)
    return Sizes(
        rows=_doubling(least_rows, most_rows, step),
        tokens=_doubling(least_tokens, most_tokens, step),
        hidden=options.hidden_size or (4096 if gpu else 1024),
        heads=options.heads or (8 if gpu else 2),
        head_dim=options.head_dim,
        stream_bytes=512 * MIB if gpu else 64 * MIB,
        largest_message=256 * MIB if gpu else 64 * MIB,
    )


def point_limit_s(options: Options, sizes: Sizes) -> float:
    """Return the time limit of one point of a curve, s."""
    attention = len(options.kernels) * len(MASKS) * len(DIRECTIONS) * len(sizes.tokens)
    return min(LONGEST_POINT_S, CURVES_SHARE * options.budget_s / (len(sizes.rows) + attention))


def transfer_limit_s(options: Options, sweeps: int) -> float:
    """Return the seconds from which on a transfer is long enough to determine the bandwidth."""
    # A sweep's sizes grow fourfold and each is sent four times: 4 x (1 + 1/4 + …) = 5.3 times the last one,
    # which itself is up to four times as long as the first that is long enough.
    return min(0.5, max(0.005, LINKS_SHARE * options.budget_s / (max(1, sweeps) * 22)))


def message_sizes(sizes: Sizes, usable_bytes: int, peers: int) -> tuple[int, ...]:
    """Return sizes of a message, bytes: from 64 KiB up, by factors of four.

    Args:
        usable_bytes: free memory of the rank that has least; an eighth of it is taken each way.
        peers: messages that a rank sends, and receives, at once.
    """
    return _doubling(64 * KIB, min(sizes.largest_message, usable_bytes // 8) // peers, 4)


def _doubling(least: int, most: int, step: int) -> tuple[int, ...]:
    """Return ``least``, ``least x step``, … up to ``most``."""
    sizes = [least]
    while sizes[-1] * step <= most:
        sizes.append(sizes[-1] * step)
    return tuple(sizes)
