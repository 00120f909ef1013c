"""Trainings of a few layers on one GPU, each with and without a plan."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.one_gpu.parts import Deadline, Row, Setting
from benchmarks.one_gpu.ranks import PLAIN, Ranks, in_turn
from benchmarks.one_gpu.standby import PEAK
from megatron_hexi.models import Job, Model, job_terms, model_flags, read_model
from megatron_hexi.models.job import Fusible
from megatron_hexi.plan import proportional_plan, write_plan

#: Operations in several kernels (`Job.unfused`) by the layers' implementation; `PLAIN` is without apex.
UNFUSED: dict[str, tuple[Fusible, ...]] = {
    "local": ("norms", "rotary", "permutation", "experts", "loss", "gradients", "optimizer"),
    "transformer_engine": Job.unfused,
}
#: Iterations that warm up.
_WARM_UP = 2
#: A training that takes longer hangs.
_TIMEOUT_S = 120
#: None is begun with less time left.
_LEAST_S = 5
#: Processes that import while another trains.
_AHEAD = 3
#: What plans call the kernels of `--hexi-kernel`: what `auto` chooses on Hopper, and the same algorithm.
_KERNELS = {"auto": "cudnn", "aten-flash": "flash-attn-2"}
#: Transformer Engine's attention by the same kernel; Megatron's ``--attention-backend``.
_BACKENDS = {"cudnn": "fused", "flash-attn-3": "flash"}


@dataclass(frozen=True)
class Cell:
    """A model that is trained with two sequences an iteration.

    Args:
        model: a preset's name; its vocabulary is cut to 32,000 words, so that logits leave room.
        layers: as many of them.
        tokens: of a sequence.
        recompute: ``none`` or ``full``.
        kernel: as for ``--hexi-kernel``.
        implementation: of the layers: Megatron's ``--transformer-impl``.
        side: under a plan of one rank, or ``stock``: without one, by Transformer Engine's attention.
        timed: iterations that are timed.
        fused_optimizer: whether local layers are beside Transformer Engine's Adam, and not torch's.
    """

    model: str
    layers: int
    tokens: int
    recompute: Literal["none", "full"] = "none"
    kernel: str = "auto"
    implementation: Literal["local", "transformer_engine"] = "local"
    side: Literal["plan", "stock"] = "plan"
    timed: int = 3
    fused_optimizer: bool = False

    @property
    def name(self) -> str:
        """For tables, without the side."""
        recompute = "" if self.recompute == "none" else f", recompute {self.recompute}"
        kernel = "" if self.kernel == "auto" else f", {self.kernel}"
        length = f"{self.tokens // 1024}K" if self.tokens >= 1024 else str(self.tokens)
        adam = ", fused Adam" if self.fused_optimizer else ""
        return f"{self.layers} layers of {self.model}, {length}{recompute}{kernel}{adam}"

    @property
    def shapes(self) -> Model:
        """The model of these layers."""
        return replace(read_model(self.model), layers=self.layers, vocab_size=32000)


@dataclass(frozen=True)
class Trained:
    """Time and memory of a training.

    Args:
        cell: which one.
        seconds: of an iteration, the median of those timed.
        peak_bytes: the most that torch's allocator handed out; ``None``: not kept.
    """

    cell: Cell
    seconds: float
    peak_bytes: int | None = None


def _both(tokens: int, timed: int, *kernels: str, recompute: Literal["none", "full"] = "none") -> list[Cell]:
    cell = Cell("llama3-8b", 4, tokens, recompute, implementation="transformer_engine", timed=timed)
    sides: tuple[Literal["stock", "plan"], ...] = ("stock", "plan")
    return [replace(cell, kernel=kernel, side=side) for kernel in kernels for side in sides]


#: Most worth first.
CELLS = (
    *_both(4096, 12, "cudnn"),
    *_both(16384, 5, "cudnn"),
    *_both(32768, 3, "cudnn"),
    *_both(65536, 2, "cudnn", recompute="full"),
    *_both(8192, 8, "cudnn"),
    *_both(16384, 5, "flash-attn-3"),
    *_both(65536, 2, "flash-attn-3", recompute="full"),
    *_both(4096, 12, "flash-attn-3"),
)
#: A model that a CPU trains in seconds.
_TINY = Cell("llama3-8b", 1, 64, timed=1)


def run(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Train all cells, the next ones importing while one trains.

    Yields:
        Each cell with its seconds, losses and memory, or why it failed.
    """
    cells = [replace(_TINY, side=side) for side in ("stock", "plan")] if setting.is_dry else list(CELLS)
    cells = [cells[number] for number in setting.cells] or cells
    if importlib.util.find_spec("flash_attn_interface") is None:
        cells = [cell for cell in cells if cell.kernel != "flash-attn-3"]
    prepared = [partial(_prepared, cell, number, setting) for number, cell in enumerate(cells)]
    for cell, ranks in zip(cells, in_turn(prepared, _AHEAD), strict=True):
        if deadline.left_s < _LEAST_S:
            ranks.end()
            yield {"cell": asdict(cell), "failed": "not run: no time left"}
            continue
        ended = ranks.run(min(_TIMEOUT_S, deadline.left_s))
        if ended.succeeded:
            yield {"cell": asdict(cell), **_measured(ranks.folder, cell)}
        else:
            yield {"cell": asdict(cell), "failed": ended.why(1500)}


def _prepared(cell: Cell, number: int, setting: Setting) -> Ranks:
    folder = setting.folder / f"training-{number}"
    folder.mkdir(parents=True)
    return Ranks(folder, "megatron_hexi.pretrain_gpt", _words(cell, folder, setting))


def _words(cell: Cell, folder: Path, setting: Setting) -> list[object]:
    job = job_of(cell, setting)
    words: list[object] = [
        *(*model_flags(job.model, cell.tokens), *setting.platform, "--bf16", "--use-distributed-optimizer"),
        *("--seq-length", cell.tokens, "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-4),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", 0, "--log-interval", 1),
        *("--train-iters", _WARM_UP + cell.timed, "--eval-iters", 0, "--eval-interval", 1000),
        *("--hexi-metrics", "metrics.jsonl", "--calculate-per-token-loss"),
    ]
    if cell.recompute == "full":
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        words += ["--recompute-num-layers", 1]
    if cell.implementation == "local" and not setting.is_dry:
        words += PLAIN
    if cell.side == "stock":
        backend = _BACKENDS.get(cell.kernel)
        return [*words, *(("--attention-backend", backend) if backend else ())]
    plan = proportional_plan(job.workload(), [[[1]]])
    write_plan(replace(plan, job=job_terms({"precision": "bf16"}, plan)), folder / "plan.yaml")
    return [*words, "--hexi-plan", "plan.yaml", "--hexi-kernel", cell.kernel]


def job_of(cell: Cell, setting: Setting | None = None) -> Job:
    """The job of a cell, as the cost model takes it."""
    model = cell.shapes
    if setting is not None and setting.is_dry:
        model = replace(model, hidden_size=64, heads=4, kv_heads=2, head_dim=16)
        model = replace(model, ffn_hidden_size=128, vocab_size=128)
    unfused = [one for one in UNFUSED[cell.implementation] if one != "optimizer" or not cell.fused_optimizer]
    return Job(
        model=model,
        seq_length=cell.tokens,
        micro_batch_size=1,
        global_batch_size=2,
        precision="bf16",
        recompute=cell.recompute,
        kernel=_KERNELS.get(cell.kernel, cell.kernel),
        unfused=tuple(unfused),
    )


def _measured(folder: Path, cell: Cell) -> Row:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines][-cell.timed :]
    peak = folder / PEAK.format(rank=0)
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "losses": [line["loss"] for line in lines],
        "peak_bytes": json.loads(peak.read_text())["peak_bytes"] if peak.exists() else None,
    }


def trained(rows: Sequence[Row]) -> list[Trained]:
    """The cells of rows that were measured."""
    return [
        Trained(Cell(**row["cell"]), row["seconds"], row.get("peak_bytes"))
        for row in rows
        if not row.get("failed")
    ]
