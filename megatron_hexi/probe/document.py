"""The sizes to measure, with FLOPs and time limits, and the measurement as plain data.

The document is printed by ``--json``, and kept to resume an interrupted probe.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_hexi.cost.compute import ATTENTION_BACKWARD
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import flag_name
from megatron_hexi.text_file import read_text, write_text_atomically
from megatron_hexi.yaml_schema import Strict, short

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


#: What `--precision` takes.
PRECISIONS = ("bf16", "fp16", "fp32")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Options(Strict):
    """Options of a probe.

    Args:
        hidden_size: hidden size of the weights; 4096 on GPUs and 1024 on CPUs if not given.
        budget_s: seconds that it all may take, roughly.
    """

    kernels: tuple[str, ...] = ("auto",)
    precision: str = "bf16"
    hidden_size: int | None = None
    heads: int | None = None
    head_dim: int = 128
    budget_s: float = 600.0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise HexiError(f"--precision {self.precision[:40]}: unknown precision; give {known}")
        for name, value, most in (
            ("hidden_size", self.hidden_size, 2**17),
            ("local_heads", self.heads, 2**10),
            ("head_dim", self.head_dim, 2**10),
        ):
            if value is not None and not 1 <= value <= most:
                raise HexiError(f"{flag_name(name)} {value}: is out of range; give a number from 1 to {most}")
        if not 1 <= self.budget_s <= 24 * 3600:
            raise HexiError(
                f"--budget {self.budget_s / 60:g}: is out of range; give minutes, as 10 (the most is a day)"
            )
        if len(set(self.kernels)) < len(self.kernels):
            raise HexiError(f"--kernel {' --kernel '.join(self.kernels)}: names one twice; name each once")


@dataclass(frozen=True)
class HostCards(Strict):
    """A host's cards of one kind, which its ranks share."""

    fabric: str
    count: int
    gbit_s: Rate


@dataclass(frozen=True)
class RankInfo(Strict):
    """Facts of a rank; equal in every run on the same machines.

    Args:
        group: the launcher's number of its node; empty if it has none.
        kind: ``cuda`` or ``cpu``.
        gpu: torch's name of its GPU; a CPU's model name.
        memory_bytes: memory of the GPU; on a CPU the rank's share of the host's, or its limit.
        versions: versions of torch and of the kernels' packages, on which its rates depend.
    """

    host: str
    group: str
    local_rank: int
    kind: Literal["cuda", "cpu"]
    gpu: str
    memory_bytes: int
    capability: tuple[int, int]
    kernels: tuple[str, ...]
    versions: dict[str, str]
    cards: HostCards | None = None


@dataclass(frozen=True)
class Series(Strict):
    """Rates of one kind of work at several sizes, on every rank.

    Args:
        sizes: rows or tokens, ascending.
        tflops: a row a rank, a column a size; ``None`` where it was not measured.
    """

    sizes: tuple[int, ...]
    tflops: tuple[tuple[Rate | None, ...], ...]


@dataclass(frozen=True)
class TransferTimes(Strict):
    """Sizes of a transfer, bytes, ascending, and the seconds until its last message had arrived."""

    sizes: tuple[int, ...]
    seconds: tuple[Seconds, ...]


@dataclass(frozen=True)
class Inside(Strict):
    """Measured transfer times inside one node.

    Args:
        ports: times of messages between all pairs of GPUs at once; a size is the bytes that one GPU sends.
        point_to_point: times of messages between two GPUs, both ways at once, of the median pair; a size is
            the bytes of one message.
        latency_s: latency of a small message between two GPUs, s, of the median pair.
    """

    node: int
    ports: TransferTimes
    all_to_all: TransferTimes
    point_to_point: TransferTimes
    latency_s: Seconds


@dataclass(frozen=True)
class Between(Strict):
    """Measured transfer times from one node to another.

    Args:
        all_ranks: times while all ranks of both nodes send or receive; a size is the bytes of all messages.
        one_rank: times of a message from one rank to one other; ``None`` where it was not measured.
    """

    src: int
    dst: int
    all_ranks: TransferTimes
    one_rank: TransferTimes | None
    latency_s: Seconds


@dataclass(frozen=True)
class Measurement(Strict):
    """All measurements so far.

    Args:
        host_bytes: each rank's part of its host's memory that is free.
        host_gb_s: GB/s of each rank between device and host, the slower direction; ``None``: no room.
        host_stream_gb_s: bandwidth of the host's memory that each rank reached, all at once.
        curves: rates by name: ``matmul``, or a kernel, mask and direction (``cudnn causal forward``).
    """

    version: Literal[1]
    started: str
    hexi: str
    options: Options
    ranks: tuple[RankInfo, ...]
    done: tuple[str, ...] = ()
    usable_bytes: tuple[int, ...] = ()
    stream_gb_s: tuple[Rate, ...] = ()
    host_bytes: tuple[int, ...] = ()
    host_gb_s: tuple[Rate | None, ...] = ()
    host_stream_gb_s: tuple[Rate, ...] = ()
    curves: dict[str, Series] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    inside: tuple[Inside, ...] = ()
    between: tuple[Between, ...] = ()
    together: TransferTimes | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)


_ADAPTER = TypeAdapter(Measurement)


def measurement_from_json(text: str) -> Measurement:
    """Return the measurement of a document that `Measurement.as_dict` gave."""
    return _ADAPTER.validate_json(text)


def load_partial(path: Path, fresh: Measurement) -> Measurement:
    """Return the measurement that an interrupted probe kept, or `fresh` if there is none."""
    remedy = "add --restart to measure everything again"
    if not os.path.lexists(path):
        return fresh
    text = read_text(path, remedy=f"remove it, or {remedy}", content_remedy=f"remove it, or {remedy}")
    try:
        kept = measurement_from_json(text)
    except ValidationError:
        raise HexiError(f"{path}: is no measurement of this version; remove the file, or {remedy}") from None
    for name, old, new in (
        ("megatron-hexi", kept.hexi, fresh.hexi),
        ("ranks", len(kept.ranks), len(fresh.ranks)),
        *((name, value, getattr(fresh.options, name)) for name, value in vars(kept.options).items()),
        *(
            (f"rank {rank}'s {name}", value, getattr(now, name))
            for rank, (then, now) in enumerate(zip(kept.ranks, fresh.ranks, strict=False))
            for name, value in vars(then).items()
        ),
    ):
        if old != new:
            raise HexiError(
                f"{path}: was measured with {name} {short(old)}, this is {short(new)}; "
                f"run the same command again, or {remedy}"
            )
    return kept


def save_partial(path: Path, measurement: Measurement) -> None:
    """Write the document whole or not at all."""
    write_text_atomically(path, json.dumps(measurement.as_dict(), allow_nan=False))
