"""`python -m benchmarks.answers`: how long commands take from the shell, beside what they are meant to take.

Each runs in a process of its own, as a user starts it, one after the other; the fastest of three counts. That
`hexi plan` takes little is measured by `benchmarks.planning`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIXED = Path(__file__).parents[1] / "examples" / "clusters" / "mixed-16.yaml"
HEXI = (sys.executable, "-m", "megatron_hexi.cli.main")
REPEATS = 3
NODE = "name: broken\nnodes:\n- {{name: n, gpu: {gpu}, gpus: {gpus}, count: {count}}}\n"
NETWORK = "network: {bandwidth_gb_s: 25}\n"
#: An alias a level: written out, these would be 9^9 values.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
#: Cluster files that are refused.
BROKEN = {
    "an unknown GPU": NODE.format(gpu="H100", gpus=8, count=2) + NETWORK,
    "a million GPUs": NODE.format(gpu="H100-SXM-80GB", gpus=1000, count=1000) + NETWORK,
    "nodes that cannot reach each other": NODE.format(gpu="H100-SXM-80GB", gpus=8, count=2),
    "a YAML bomb": BOMB,
}


@dataclass(frozen=True)
class Question:
    """A command.

    Args:
        name: for people.
        words: of the command line, `hexi` aside.
        code: its exit code.
        limit_s: what it is meant to take at most.
    """

    name: str
    words: tuple[str, ...]
    code: int
    limit_s: float


@dataclass(frozen=True)
class Answer:
    """What it took, wall time."""

    name: str
    seconds: float
    limit_s: float


def questions(folder: Path) -> Iterator[Question]:
    """Everything that is measured; files are written into the folder."""
    job = "--model", "gpt-7b", "--recompute-granularity", "full"
    compare = "compare", str(MIXED), *job, "--seq-length"
    yield Question("hexi compare, 8 H100 + 8 A100, 256K", (*compare, "262144"), 0, 3.0)
    for number, (name, text) in enumerate(BROKEN.items()):
        path = folder / f"broken-{number}.yaml"
        path.write_text(text, encoding="utf-8")
        words = "plan", str(path), *job, "--seq-length", "65536", "-o", str(folder / "plan.yaml")
        yield Question(f"hexi plan, {name}", words, 2, 2.0)
    yield Question("hexi compare, a context too long for memory", (*compare, str(2**26)), 3, 2.0)


def measure(question: Question, repeats: int = REPEATS) -> Answer:
    """Ask several times.

    Raises:
        RuntimeError: the command ended otherwise than it should.
    """
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        done = subprocess.run(
            [*HEXI, *question.words], env=os.environ, capture_output=True, text=True, check=False
        )
        seconds.append(time.perf_counter() - begun)
        if done.returncode != question.code:
            raise RuntimeError(f"{question.name}: exit code {done.returncode}\n{done.stderr}")
    return Answer(question.name, min(seconds), question.limit_s)


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        answers = [measure(question) for question in questions(Path(folder))]
    if options.json:
        print(json.dumps([asdict(answer) for answer in answers], indent=1))
        return 0
    for answer in answers:
        met = "" if answer.seconds <= answer.limit_s else "  too long"
        print(f"{answer.name:48} {answer.seconds:5.2f} s of {answer.limit_s:.0f} s{met}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
