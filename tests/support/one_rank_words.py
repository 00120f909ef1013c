"""Words of small jobs of every kind of model, and words that set each option of Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_hexi.options.parser import Row, read_rows
from megatron_hexi.options.registry import class_of

_JOB = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --normalization RMSNorm "
    "--vocab-size 128 --attention-dropout 0 --hidden-dropout 0 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-4 --train-iters 10 --max-position-embeddings 64 --mock-data "
    "--tokenizer-type NullTokenizer --no-rope-fusion --bf16"
)
_ROTARY = f"{_JOB} --disable-bias-linear --swiglu --position-embedding-type rope"
#: Words of jobs, by the kind of model.
JOBS = {
    "rotary": _ROTARY,
    "learned": _JOB,
    "experts": f"{_ROTARY} --num-experts 8 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-topk 2",
    "latent": f"{_ROTARY} --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8",
    "hybrid": f"{_JOB} --disable-bias-linear --squared-relu --position-embedding-type none "
    "--hybrid-layer-pattern M*-M --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 16",
    "delta": f"{_ROTARY} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "multi-token": f"{_ROTARY} --mtp-num-layers 1",
}
#: Kinds of jobs in which each option is tried alone.
SWEPT = ("rotary", "experts", "latent")
#: What Megatron's own checks stop of single options, after a line with Megatron's version.
STOPPED = Path(__file__).parent / "data" / "stopped_options.jsonl"
_VALUES = {
    "int": "0 1 2 3 8",
    "float": "0 0.5 2.0",
    "pair": "16,0",
    "pattern": "2 [1]*2+[0]*2",
    "bool": "true",
    "name": "local",
}


class Stopped(NamedTuple):
    """Words of one option that Megatron stops, the kinds of jobs that it stops, and what it says."""

    words: str
    jobs: list[str]
    said: str


def read_stopped() -> list[Stopped]:
    """Return what Megatron stops of single options, as recorded."""
    lines = STOPPED.read_text(encoding="utf-8").splitlines()[1:]
    return [Stopped(**json.loads(line)) for line in lines]


def job_with(kind: str, words: str) -> str:
    """Return the words of a job with one more option; its batch is one of up to 8 replicas."""
    return f"{JOBS[kind]} --global-batch-size 24 {words}"


def all_rows() -> list[Row]:
    """Return the options of Megatron 0.19."""
    return [row for row in read_rows() if "0.19" in row.versions]


def allowed_rows() -> list[Row]:
    """Return the options of Megatron 0.19 that plans may train with."""
    return [row for row in all_rows() if not any(class_of(flag) == "refused" for flag in row.flags)]


def choices(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return words that set each of some options, each to several values."""
    return [words for row in rows for words in _settings(row)]


def _settings(row: Row) -> Iterator[tuple[str, ...]]:
    flag = row.flags[0]
    if row.kind in ("true", "false", "both"):
        yield (flag,)
        yield from ((spelling,) for spelling in row.flags[1:] if spelling.startswith("--no-"))
        return
    values = row.choices or _VALUES.get(row.type, "x").split()
    for value in values:
        yield (flag, *([str(value)] * (row.nargs if isinstance(row.nargs, int) else 1)))
