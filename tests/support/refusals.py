"""Calls of hexi that must be refused, in a folder with good files."""

from __future__ import annotations

import functools
import io
import json
import stat
from pathlib import Path

from megatron_hexi.plan import Workload, dump_plan, proportional_plan
from tests.support.records import PLAN, interval, start, write_record
from tests.support.shell import call_hexi, is_one_error_line

NODES = "- {name: h100, gpu: H100-SXM-80GB, gpus: 4}\n- {name: a100, gpu: A100-SXM-80GB, gpus: 4}\n"
NETWORK = "network: {bandwidth_gb_s: 25}\n"
CLUSTER = f"name: small\nnodes:\n{NODES}{NETWORK}"
#: A small model of the Llama family.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
ARGUMENTS = (
    "--num-layers 2\n--hidden-size 512\n--num-attention-heads 4\n--vocab-size 1000\n"
    "--max-position-embeddings 4096\n"
)
SINFO = "h100|batch|h100|gpu:4\na100|batch|a100|gpu:4\n"


@functools.cache
def _plans() -> dict[str, str]:
    """The text of the plans by the names of their files: a test takes less long than to write it out."""
    equal = proportional_plan(Workload(4096, 32, 32, 128), [[[2] * 4, [1] * 4]])
    return {"plan.yaml": dump_plan(equal), "run.yaml": dump_plan(PLAN)}


def write_good_files() -> None:
    """Into the current folder: a cluster, a plan for its eight GPUs, two models, a run's plan and record."""
    for name, text in _plans().items():
        Path(name).write_text(text)
    Path("cluster.yaml").write_text(CLUSTER)
    Path("config.json").write_text(json.dumps(CONFIG, indent=1))
    Path("arguments.txt").write_text(ARGUMENTS)
    write_record(Path("record.jsonl"), start(), interval(1))


def snapshot(folder: Path) -> dict[Path, object]:
    """Every entry and what is in it; devices and FIFOs are not opened."""
    found: dict[Path, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        content: object = status.st_size
        if kind == stat.S_IFLNK:
            content = path.readlink()
        elif kind == stat.S_IFREG and status.st_size < 2**20:
            content = path.read_bytes()
        found[path] = kind, status.st_rdev, content
    return found


def refused(monkeypatch, capsys, folder: Path, words, code: int = 2, printed: str = "") -> str:
    """Call hexi and check that it refuses as it should: one line, nothing else printed, nothing written.

    Args:
        monkeypatch: pytest's.
        capsys: pytest's.
        folder: where nothing may change.
        words: of the command line.
        code: the exit code.
        printed: what may stand on standard output.

    Returns:
        What it says.
    """
    before = snapshot(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(SINFO))
    result = call_hexi(monkeypatch, capsys, words)
    assert result.code == code, result.err
    assert result.out in ("", printed)
    assert is_one_error_line(result.err), result.err
    assert snapshot(folder) == before
    return result.err
