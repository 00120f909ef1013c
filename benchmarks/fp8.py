"""`python -m benchmarks.fp8`: what fp8 on the GPUs that have it is worth, as the table of docs/fp8.md.

Of each job on each fleet: the plan in bf16, the plan in fp8, and the best layout of Megatron's flags, which
know one precision for all ranks. Simulated, by the cost model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.layouts import A100, CARDS, H100, H200, Machines
from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job, presets
from megatron_hexi.plan.terms import Precision
from megatron_hexi.planner import Planned, Request, find_plan

#: Two kinds of GPUs, two nodes of 8 of each.
FLEETS = ((H100, A100), (H200, "B200-180GB"))
#: Models with tokens of a sequence, and sequences of an iteration.
JOBS = (("llama3-70b", 32768, 64), ("llama3-70b", 131072, 16), ("qwen3-30b-a3b", 32768, 64))
_HEADER = "| GPUs | model, tokens | bf16 | fp8 | faster | Megatron's best flags | ours faster |"


def planned(model: str, tokens: int, batch: int, cluster: Cluster, precision: Precision) -> Planned:
    """Return the plan of a job in a precision; in fp8 with Megatron's flags beside it."""
    job = Job(presets()[model], tokens, global_batch_size=batch, precision=precision, fp8_recipe="tensorwise")
    return find_plan(Request(job, memory_margin=0.05), cluster, with_baselines=precision == "fp8")


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield _HEADER
    yield "|---|---|---:|---:|---:|---|---:|"
    for kinds in FLEETS:
        cluster = Machines(tuple((kind, 2, 8) for kind in kinds), CARDS).cluster("mixed")
        for model, tokens, batch in JOBS:
            plain, low = (planned(model, tokens, batch, cluster, one) for one in ("bf16", "fp8"))
            found = [(one.tokens_per_s or 0.0, one) for one in low.baselines]
            speed, best = max(found, key=lambda entry: entry[0])
            ours, usual = low.cost.tokens_per_s, plain.cost.tokens_per_s
            flags = f"{speed:,.0f}: {best.layout}, {best.trial.job.precision}" if best.trial else "none fits"
            times = f"{ours / speed:.2f}x" if best.trial else ""
            gpus = " + ".join(f"16 {kind.partition('-')[0]}" for kind in kinds)
            shown = f"{usual:,.0f} | {ours:,.0f} | {ours / usual:.2f}x | {flags} | {times} |"
            yield f"| {gpus} | {model}, {tokens // 1024}K | {shown}"


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=__doc__).parse_args()
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
