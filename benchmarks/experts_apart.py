"""`python -m benchmarks.experts_apart`: the most that attention and experts on GPUs of their own can gain.

Two kinds of GPU, as many of each, at their best rates, without communication or waiting: once every GPU does
all the work of its tokens, and once attention and experts are assigned freely, by a linear program. Layouts
of the second sort gain at most the ratio. It is 1 where one kind is slower at both by the same factor.

All work on a rank's own tokens counts as attention here: projections, norms, router, shared experts, logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from ortools.linear_solver import pywraplp

from benchmarks.layouts import A100, H100, L40S, K
from megatron_hexi.cluster import device
from megatron_hexi.cost.ceiling import attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.models import Job, read_model

V100 = "V100-SXM2-32GB"
#: Of the same chip as the A40, which HeterMoE has beside V100 (arXiv 2504.03871).
A6000 = "A6000-48GB"
#: Pairs of kinds of GPU; beside V100 both train in fp16.
PAIRS = ((H100, A100), (H100, L40S), (A100, V100), (A6000, V100))
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b")
LENGTHS = (4 * K, 32 * K, 128 * K)


def most_gain(seconds: tuple[tuple[float, float], tuple[float, float]]) -> float:
    """Return the tokens/s with attention and experts assigned freely, over those of whole tokens.

    Args:
        seconds: of a token's attention and of its experts, on one GPU of each kind.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    unit = sum(seconds[0])
    done = [[solver.NumVar(0, solver.infinity(), "") for _ in kind] for kind in seconds]
    tokens = solver.NumVar(0, solver.infinity(), "")
    for work, kind in zip(done, seconds, strict=True):
        solver.Add(sum(part * each / unit for part, each in zip(work, kind, strict=True)) <= 1)
    for part in zip(*done, strict=True):
        solver.Add(sum(part) == tokens)
    solver.Maximize(tokens)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("the linear program has a solution for any positive seconds")
    return float(tokens.solution_value()) / sum(unit / sum(kind) for kind in seconds)


def rows() -> Iterator[dict[str, str | int | float]]:
    """Yield the gain of each pair of GPUs with each model and length."""
    for first, second in PAIRS:
        for name in MODELS:
            for length in LENGTHS:
                job = Job(read_model(name), length, precision="fp16" if second == V100 else "bf16")
                fast, slow = (_seconds(gpu, job) for gpu in (first, second))
                share = fast[0] / sum(fast)
                gain = most_gain((fast, slow))
                yield {
                    "gpus": f"{first} + {second}",
                    "model": name,
                    "length": length,
                    "attention_share": round(share, 3),
                    "attention_ratio": round(slow[0] / fast[0], 3),
                    "expert_ratio": round(slow[1] / fast[1], 3),
                    "most_gain": round(gain, 3),
                }


def _seconds(gpu: str, job: Job) -> tuple[float, float]:
    """Return the seconds of a token's attention and of its experts on one GPU."""
    speeds = device_speeds(device(gpu), job)
    own = token_seconds(speeds, job, with_experts=False)
    return own + attention_seconds(speeds, job, causal=True), token_seconds(speeds, job) - own


def main() -> int:
    """Print the table, or with ``--json`` its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    found = list(rows())
    if parser.parse_args().json:
        print(json.dumps(found, indent=1))
        return 0
    print("attention: its part of a token's time on the faster GPU; times slower: the other GPU, at each")
    for row in found:
        print(
            f"{row['gpus']:34} {row['model']:16} {row['length']:7,}: attention {row['attention_share']:.0%}, "
            f"{row['attention_ratio']:.2f} and {row['expert_ratio']:.2f} times slower: at most "
            f"{row['most_gain']:.3f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
