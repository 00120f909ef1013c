"""The measurement as plain data: printed by ``--json``, and kept to resume an interrupted probe."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import flag_name
from megatron_hexi.text_file import read_text, write_text_atomically
from megatron_hexi.yaml_schema import short

_STRICT = ConfigDict(extra="forbid")

#: What `--precision` takes.
PRECISIONS = ("bf16", "fp16", "fp32")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a probe.

    Args:
        kernels: attention kernels; ``auto`` is what a job on that GPU would choose.
        hidden_size: hidden size of the weights; 4096 on GPUs and 1024 on CPUs if not given.
        heads: number of attention heads; 8 on GPUs and 2 on CPUs if not given.
        budget_s: seconds that it all may take, roughly.
        quick: measure at fewer sizes.
    """

    kernels: tuple[str, ...] = ("auto",)
    precision: str = "bf16"
    hidden_size: int | None = None
    heads: int | None = None
    head_dim: int = 128
    budget_s: float = 600.0
    quick: bool = False

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise HexiError(
                f"--precision {self.precision[:40]}: unknown precision; give {', '.join(PRECISIONS)}"
            )
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
class HostCards:
    """A host's cards of one kind, which its ranks share.

    Args:
        fabric: ``infiniband`` or ``roce``.
    """

    fabric: str
    count: int
    gbit_s: Rate

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class RankInfo:
    """Facts of a rank; equal in every run on the same machines.

    Args:
        host: its host's name.
        group: the launcher's number of its node; empty if it has none.
        kind: ``cuda`` or ``cpu``.
        gpu: torch's name of its GPU; a CPU's model name.
        memory_bytes: memory of the GPU; on a CPU the rank's share of the host's, or its limit.
        capability: CUDA compute capability; 0, 0 for a CPU.
        kernels: the attention kernels that it measures, one for each that was asked for.
        versions: versions of torch and of the kernels' packages, on which its rates depend.
        cards: the fastest kind of its host's; ``None``: no InfiniBand or RoCE device is up, or allowed.
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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Series:
    """Rates of one kind of work at several sizes, on every rank.

    Args:
        sizes: rows or tokens, ascending.
        tflops: a row a rank, a column a size; ``None`` where it was not measured.
    """

    sizes: tuple[int, ...]
    tflops: tuple[tuple[Rate | None, ...], ...]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class TransferTimes:
    """Sizes of a transfer, bytes, ascending, and the seconds until its last message had arrived."""

    sizes: tuple[int, ...]
    seconds: tuple[Seconds, ...]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Inside:
    """Measured transfer times inside one node.

    Args:
        ports: times of messages between all pairs of GPUs at once; a size is the bytes that one GPU sends.
        all_to_all: times of one all-to-all collective, sizes as in `ports`; it may be slower.
        point_to_point: times of messages between two GPUs, both ways at once, of the median pair; a size is
            the bytes of one message.
        latency_s: latency of a small message between two GPUs, s, of the median pair.
    """

    node: int
    ports: TransferTimes
    all_to_all: TransferTimes
    point_to_point: TransferTimes
    latency_s: Seconds

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Between:
    """Measured transfer times from one node to another.

    Args:
        all_ranks: times while all ranks of both nodes send or receive; a size is the bytes of all messages.
        one_rank: times of a message from one rank to one other; ``None`` where it was not measured.
        latency_s: latency of a small message, s.
    """

    src: int
    dst: int
    all_ranks: TransferTimes
    one_rank: TransferTimes | None
    latency_s: Seconds

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class Measurement:
    """All measurements so far.

    Args:
        version: version of this document's format.
        started: date, UTC.
        usable_bytes: memory that each rank found free.
        host_bytes: each rank's part of its host's memory that is free.
        host_gb_s: GB/s of each rank between device and host, the slower direction; ``None``: no room.
        host_stream_gb_s: bandwidth of the host's memory that each rank reached, all at once.
        curves: rates by name: ``matmul``, or a kernel, mask and direction (``cudnn causal forward``).
        together: transfers between all ranks of different nodes at once.
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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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
        raise HexiError(f"{path}: is no measurement of this version; remove it, or {remedy}") from None
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
