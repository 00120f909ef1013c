"""Random fleets and jobs with some numbers fixed, and what the planner promises of them.

Each case comes from a number alone. A case is planned with all of its numbers fixed, and again with one less,
down to none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random
from typing import Any

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.baselines import find_faster
from tests.support.fleets import read_text

GPUS = ("H100-SXM-80GB", "A100-SXM-80GB", "A800-SXM-80GB", "L40S-48GB")
MORE_GPUS = ("H200-SXM-141GB", "A100-SXM-40GB", "RTX4090-24GB", "A10G-24GB")
NETWORKS = ((50, "gpu"), (25, "gpu"), (25, "node"), (5, "node"), (0.7, "node"))
MODELS = ("gpt-3b", "gpt-7b", "gpt-13b", "llama3-8b", "qwen3-32b", "llama3-70b")
#: Usable memory that plans keep free, where any does.
MARGIN = 0.05
#: A plan with less fixed may take so much longer than one with more; so much where nodes lack GPUs.
LONGER, UNEVEN_LONGER = 1.002, 1.03
#: An iteration of any layout takes less.
FOREVER_S = 1e30


@dataclass(frozen=True)
class Case:
    """A fleet, a job, and numbers to fix.

    Args:
        text: the cluster file.
        cluster: the same, read.
        job: without what is fixed.
        fixed: values by the job's fields; each is fixed together with those before it.
    """

    text: str
    cluster: Cluster
    job: dict[str, Any]
    fixed: dict[str, Any]

    def request(self, count: int) -> Request:
        """With so many of the numbers fixed.

        Raises:
            HexiError: the model cannot be cut so.
        """
        fixed = dict(itertools.islice(self.fixed.items(), count))
        return Request(Job(**self.job, **fixed), frozenset(fixed), MARGIN)


def random_promise(seed: int, *, uneven: bool = False) -> Case:
    """The case of a number: 4 to 64 GPUs of up to three kinds, and one to four numbers to fix.

    Args:
        seed: the number.
        uneven: whether nodes lack up to three GPUs.
    """
    draw = Random(f"promise {seed}")
    size = draw.choice((2, 4, 4, 8, 8, 8))
    nodes = draw.randint(max(1, 4 // size), min(64 // size, 8))
    kinds = draw.sample((*GPUS, *MORE_GPUS), draw.randint(1, min(3, nodes)))
    cuts = sorted(draw.sample(range(1, nodes), len(kinds) - 1))
    counts = [last - first for first, last in itertools.pairwise([0, *cuts, nodes])]
    rate, per = draw.choice(NETWORKS)
    entries = [
        f"- {{name: n{place}, count: {count}, gpu: {kind}, gpus: {size}}}"
        for place, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]
    if uneven:
        lost = Random(f"lost {seed}")
        kind_of = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        entries = [
            f"- {{name: n{place}, gpu: {kind}, gpus: {max(1, size - lost.choice((0, 0, 1, 2, 3)))}}}"
            for place, kind in enumerate(kind_of)
        ]
    network = f"network: {{bandwidth_gb_s: {rate}, latency_us: 10, per: {per}}}"
    text = "\n".join(["name: fleet", "nodes:", *entries, network, ""])
    gpus = size * nodes
    model = read_model(draw.choice(MODELS[: 4 if gpus <= 16 else 6]))
    length, batch = 2 ** draw.randint(12, 18), 2 ** draw.randint(2, 7)
    width = draw.choice([width for width in (1, 2, 4, 8) if width <= size])
    depth = draw.randint(1, max(1, min(8, gpus // width)))
    replicas = draw.randint(1, max(1, min(6, gpus // width // depth, batch)))
    micro = draw.choice([one for one in (1, 1, 1, 2, 4) if batch % one == 0 and one * replicas <= batch])
    values = {
        "tensor_parallel": width,
        "pipeline_parallel": depth,
        "data_parallel": replicas,
        "micro_batch_size": micro,
        "recompute": draw.choice(("none", "selective", "full", "full")),
    }
    order = draw.sample(sorted(values), draw.randint(1, 4))
    job = {"model": model, "seq_length": length, "global_batch_size": batch}
    return Case(text, read_text(text), job, {name: values[name] for name in order})


@dataclass(frozen=True)
class Kept:
    """What was found for one number of fixed terms; seconds are those of an iteration.

    Args:
        fixed: how many.
        seconds: of the plan; ``None`` where none was found.
        keeps_margin: whether the plan leaves the margin of memory free.
        megatron_s: of the best layout of Megatron's flags under the same memory; ``None``: none fits.
        layout: for a reader.
    """

    fixed: int
    seconds: float | None
    keeps_margin: bool
    megatron_s: float | None
    layout: str


def plan_case(case: Case) -> list[Kept]:
    """Plan with all numbers fixed, then with one less at a time."""
    found = []
    for count in range(len(case.fixed), -1, -1):
        try:
            request = case.request(count)
            planned = find_plan(request, case.cluster)
        except NothingFitsError:
            margin, seconds, layout = 0.0, None, "nothing fits"
        except HexiError:
            continue  # the model cannot be cut so, or the cluster has no such units
        else:
            full = max(rank.memory_gib / rank.usable_gib for rank in planned.cost.ranks)
            margin = MARGIN if full <= 1 - MARGIN + 1e-9 else 0.0
            seconds, layout = planned.cost.iteration_s, str(planned.plan.job)
        best, _ = find_faster(request, case.cluster.with_memory_margin(margin), FOREVER_S)
        found.append(Kept(count, seconds, margin > 0, None if best is None else best.iteration_s, layout))
    return found


def broken(found: list[Kept], longer: float = LONGER) -> list[str]:
    """Return a line for each promise that is broken.

    Args:
        found: what was found with each number of fixed terms.
        longer: the factor by which a plan with fewer terms fixed may take longer than one with more.
    """
    lines = []
    for one in found:
        if one.megatron_s is not None and (one.seconds is None or one.seconds > one.megatron_s * (1 + 1e-9)):
            lines.append(f"{one.fixed} fixed: {one.seconds} s, Megatron's flags {one.megatron_s} s")
    for more, less in itertools.combinations(found, 2):
        if more.seconds is None or (less.keeps_margin and not more.keeps_margin):
            continue  # the one that keeps memory free may be slower
        if less.seconds is None or less.seconds > more.seconds * longer:
            lines.append(f"{less.fixed} fixed: {less.seconds} s, {more.fixed} fixed: {more.seconds} s")
    return lines
