"""`python -m benchmarks.blocks PLAN.yaml`: attention of all ranks of a plan on one device, without a wire.

Each rank's own block, rectangles and merging, forward and backward, run one after another as the runtime runs
them, over one call of the same kernel with the same area; both sides in turns, in one process. Keys that
other ranks would send are whatever the buffers hold. Ranks with the same work are run once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from megatron_hexi.errors import user_errors
from megatron_hexi.plan import Plan, Schedule, build_schedule, read_plan
from megatron_hexi.runtime import exchange, select_kernel
from megatron_hexi.runtime.all_to_all import Arriving, Leaving
from megatron_hexi.runtime.compiled import Recorder, Value
from megatron_hexi.runtime.kernels import BlockKind, Mode
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import Transfers

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One rank, and all that have the same work.

    Args:
        ranks: which.
        heads: query heads of each.
        group_tokens: tokens of their groups.
        calls: of the kernel, in each direction.
        kernel: its name.
        forward_ms: of the schedule.
        backward_ms: likewise.
        forward_ratio: over one call of the same area.
        backward_ratio: likewise.
        peak_gib: the most memory that the schedule needed; 0 without CUDA.
    """

    ranks: list[int]
    heads: int
    group_tokens: int
    calls: int
    kernel: str
    forward_ms: float
    backward_ms: float
    forward_ratio: float
    backward_ratio: float
    peak_gib: float


class _Here(Arriving):
    """Tensors that are in the heads' layout already."""

    def __init__(self, values: list[Value]) -> None:
        self._values = values

    def wait(self) -> list[Value]:
        return self._values


class _Alone(AttentionLayer):
    """A rank whose tensors stay in the heads' layout; of the outputs it returns the last half."""

    def arriving(self, recorder: Recorder, half: int, query: Value, *keys: Value) -> Arriving:
        tensors = query.cut(None, None, self.own_halves[half]), *keys
        shapes = [(batch, heads, rows, size) for rows, batch, heads, size in (t.shape for t in tensors)]
        heads_first = partial(torch.permute, dims=(1, 2, 0, 3))
        return _Here(
            [recorder.make(heads_first, shape, own) for shape, own in zip(shapes, tensors, strict=True)]
        )

    def leaving(self, recorder: Recorder, half: int, query: RowSum, *keys: RowSum) -> Leaving:
        alone = replace(self.schedule, members=self.schedule.members[:1])
        return Leaving(recorder, (query, *keys), (), alone, self.a2a_group)


def measure(plan: Plan, device: torch.device, dtype: torch.dtype, kernel: str, repeats: int) -> list[Row]:
    """All ranks of a plan's replicas.

    Args:
        plan: a plan that passed its checks.
        device: where to run.
        dtype: of queries, keys and values.
        kernel: its name, or ``auto``.
        repeats: of each side.
    """
    alike: dict[object, tuple[Schedule, list[int]]] = {}
    for replica in plan.replicas:
        for index, member in enumerate(replica.domain.members):
            schedule = build_schedule(plan.workload, replica.domain, index, plan.exchange.parts)
            work = tuple((step.blocks, tuple(part.pieces for part in step.parts)) for step in schedule.steps)
            key = schedule.own_heads, schedule.own_kv, schedule.group_tokens, schedule.halves, work
            alike.setdefault(key, (schedule, []))[1].append(member.number)
    rows = []
    for schedule, ranks in alike.values():
        if schedule.own_heads and schedule.group_tokens:
            rows.append(_measure(plan, schedule, ranks, device, dtype, kernel, repeats))
    return rows


def _measure(
    plan: Plan,
    schedule: Schedule,
    ranks: list[int],
    device: torch.device,
    dtype: torch.dtype,
    kernel: str,
    repeats: int,
) -> Row:
    workload, scale = plan.workload, 1 / math.sqrt(plan.workload.head_dim)
    chosen = select_kernel(kernel, device, dtype, workload.head_dim)
    groups = mock.sentinel.domain, mock.sentinel.group
    kv_heads = schedule.own_kv[1] - schedule.own_kv[0]

    def made(heads: int) -> Tensor:
        """[G, B, heads, D]."""
        return torch.randn(schedule.group_tokens, 1, heads, workload.head_dim, device=device, dtype=dtype)

    own = made(schedule.own_heads), made(kv_heads), made(kv_heads)
    out_grad = made(schedule.own_heads)
    layer = _Alone(schedule, chosen, scale, *groups, plan.exchange.window, Inputs.from_tensors(*own))

    def forward() -> list[Tensor]:
        return layer.forward(*own, None)[1:]

    with _nothing_sent():
        saved = forward()
        side = max(1, round(math.sqrt(2 * _area(schedule))))
        square = [
            torch.randn(1, heads, side, workload.head_dim, device=device, dtype=dtype)
            for heads in (schedule.own_heads, kv_heads, kv_heads, schedule.own_heads)
        ]
        query, keys, values, gradient = square
        if (
            schedule.own_heads % kv_heads
        ):  # a kernel takes one ratio: a KV head of its own for each query head
            keys, values = (torch.randn_like(query) for _ in range(2))
        whole = chosen.choose(BlockKind(query.shape, keys.shape, True, device))
        mode = Mode(causal=True, scale=scale)
        out, lse = whole.forward(query, keys, values, mode)

        def backward() -> object:
            return layer.backward(out_grad, *saved, None)

        peak = _peak_gib(device, lambda: (forward(), backward()))
        times = _in_turns(
            [
                forward,
                lambda: whole.forward(query, keys, values, mode),
                backward,
                lambda: whole.backward(gradient, query, keys, values, out, lse, mode),
            ],
            device,
            repeats,
        )
    calls = sum(len(step.blocks) * len(part.pieces) for step in schedule.steps for part in step.parts)
    return Row(
        ranks=ranks,
        heads=schedule.own_heads,
        group_tokens=schedule.group_tokens,
        calls=len(schedule.halves) + calls,
        kernel=chosen.name,
        forward_ms=1e3 * times[0],
        backward_ms=1e3 * times[2],
        forward_ratio=times[0] / times[1],
        backward_ratio=times[2] / times[3],
        peak_gib=peak,
    )


def _area(schedule: Schedule) -> float:
    """Pairs of a query and a key that one head sees."""
    blocks = [block for step in schedule.steps for block in step.blocks]
    return float(sum(block.area for block in (*schedule.own, *schedule.own_beside, *blocks)))


@contextmanager
def _nothing_sent() -> Iterator[None]:
    with mock.patch.object(exchange, "post", return_value=Transfers()):
        yield


def _in_turns(runs: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median seconds of each; one after the other, again and again, so that none has the warmer device."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for number, run in enumerate(runs):
            seconds = _seconds(run, device)
            if repeat:
                times[number].append(seconds)
    return [statistics.median(some) for some in times]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _peak_gib(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        run()
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) / GIB


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0, or 2 where there is no such device.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    parser.add_argument("plan", type=Path, help="as hexi plan writes it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--precision", choices=sorted(_TYPES), default="bf16", help="default %(default)s")
    parser.add_argument("--kernel", default="auto", help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="of each side (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU here; --device cpu tries small plans", file=sys.stderr)
        return 2
    with user_errors():
        plan = read_plan(options.plan)
        device = torch.device(options.device)
        rows = measure(plan, device, _TYPES[options.precision], options.kernel, options.repeats)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print("heads  group tokens  calls  forward              backward             peak      ranks")
    for row in rows:
        print(
            f"{row.heads:5d} {row.group_tokens:13d} {row.calls:6d}  {row.forward_ms:8.2f} ms "
            f"({row.forward_ratio:.3f}x)  {row.backward_ms:8.2f} ms ({row.backward_ratio:.3f}x)  "
            f"{row.peak_gib:5.2f} GiB {row.ranks}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
