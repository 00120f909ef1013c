"""A mixed cluster on one GPU: ranks with unequal parts of its multiprocessors train one long sequence.

For each cluster the ranks are probed, everything is planned from what the probe found, as a user would, and
the plan and the layouts of Megatron's flags are trained. Messages go through sockets of the host, so
sequences are long and key and value heads few.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.measured.layouts import Layout, find_layouts
from benchmarks.one_gpu import mps
from benchmarks.one_gpu.parts import Deadline, Row, Setting
from benchmarks.one_gpu.ranks import Ranks, in_turn
from megatron_hexi.cluster import read_cluster
from megatron_hexi.models import Job, Model, job_terms, model_flags
from megatron_hexi.plan import write_plan
from megatron_hexi.planner import CHOSEN, Request
from megatron_hexi.planner.planner import find_plan

_WARM_UP, _TIMED = 2, 3
_PROBE_S = 90.0
_TRAIN_S = 90.0
#: None is begun with less time left.
_LEAST_S = 10.0
#: Losses of one model under two plans differ by less, in bf16.
ALIKE = 2e-3
#: Layouts that the plan is held against, by the planner's names.
BASELINES = frozenset({"ring", "ulysses", "proportion"})
#: Little but attention: 27 M weights, so that their gradients travel quickly.
_MODEL = Model(
    "narrow", 2, hidden_size=1024, heads=16, kv_heads=2, head_dim=128, ffn_hidden_size=2816, gated=True,
    vocab_size=512, tied_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True)
class MixedCluster:
    """Ranks on one GPU.

    Args:
        name: the ratio of their speeds.
        speeds: their parts of the multiprocessors.
        tokens: of the sequence.
    """

    name: str
    speeds: tuple[float, ...]
    tokens: int = 131072


#: Most worth first; the last is the control.
CLUSTERS = (MixedCluster("2:1", (2, 1)), MixedCluster("1:1", (1, 1)), MixedCluster("3:2:1", (3, 2, 1)))


def run(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Probe, plan and train on each cluster.

    Yields:
        For each cluster what the probe found; then each layout with predicted and measured seconds.

    Raises:
        NoMpsError: processes cannot share the GPU's multiprocessors.
    """
    clusters = (MixedCluster("2:1", (2, 1), tokens=128),) if setting.is_dry else CLUSTERS
    with ExitStack() as stack:
        variables: Mapping[str, str] = {} if setting.is_dry else stack.enter_context(mps.service())
        for cluster in clusters:
            if deadline.left_s < 60:
                yield {"cluster": cluster.name, "failed": "not run: no time left"}
                continue
            yield from _on_cluster(cluster, mps.shares(variables, cluster.speeds), setting, deadline)


def _on_cluster(
    cluster: MixedCluster, environment: Sequence[Mapping[str, str]], setting: Setting, deadline: Deadline
) -> Iterator[Row]:
    folder = setting.folder / f"mixed-{cluster.name.replace(':', '-')}"
    probed, count = folder / "cluster.yaml", len(cluster.speeds)
    job = _job(cluster, setting)
    words = ["probe", "-o", probed, "--quick", "--budget", "0.25", "--precision", job.precision, "--restart"]
    ended = Ranks(folder, "megatron_hexi.cli.main", words, count, environment).run(
        min(_PROBE_S, deadline.left_s)
    )
    if not ended.succeeded:
        yield {"cluster": cluster.name, "failed": f"probe: {ended.why(1500)}"}
        return
    yield {"cluster": cluster.name, "speeds": list(cluster.speeds), "probed": probed.read_text()}
    planned = find_plan(Request(job, frozenset(CHOSEN)), read_cluster(probed), with_baselines=True)
    names = {"ring"} if setting.is_dry else BASELINES
    layouts, missing = find_layouts(planned, read_cluster(probed), names)
    for name, why in missing.items():
        yield {"cluster": cluster.name, "layout": name, "failed": why}
    prepared = [partial(_prepared, layout, folder, setting, environment) for layout in layouts]
    for layout, ranks in zip(layouts, in_turn(prepared, 1), strict=True):
        row: Row = {"cluster": cluster.name, "layout": layout.name, "predicted_s": layout.predicted_s}
        if deadline.left_s < _LEAST_S:
            ranks.end()
            yield {**row, "failed": "not run: no time left"}
            continue
        ended = ranks.run(min(_TRAIN_S, deadline.left_s))
        yield {**row, **(_measured(ranks.folder) if ended.succeeded else {"failed": ended.why(1500)})}
    if deadline.left_s > _LEAST_S and not setting.is_dry and cluster is CLUSTERS[0]:
        profiled = replace(layouts[0], name="profile")
        ranks = _prepared(profiled, folder, setting, environment, "benchmarks.one_gpu.profiled")
        ended = ranks.run(min(_TRAIN_S, deadline.left_s))
        for path in sorted(ranks.folder.glob("profile-*.json")):
            yield {"cluster": cluster.name, "profile": path.stem, **json.loads(path.read_text())}
        if not ended.succeeded:
            yield {"cluster": cluster.name, "profile": "", "failed": ended.why(1500)}


def _prepared(
    layout: Layout,
    folder: Path,
    setting: Setting,
    environment: Sequence[Mapping[str, str]],
    entry: str = "megatron_hexi.pretrain_gpt",
) -> Ranks:
    """Write a layout's plan, and start its ranks."""
    own = folder / layout.name.replace(", ", "+")
    own.mkdir()
    job, written = layout.job, replace(layout.plan, gpus=None)
    stated = {term: value for term, value in vars(job).items() if term != "kernel"}
    write_plan(replace(written, job=job_terms(stated, written)), own / "plan.yaml")
    words: list[object] = [
        *(*model_flags(job.model, job.seq_length), *setting.platform, "--seq-length", job.seq_length),
        *("--micro-batch-size", 1, "--global-batch-size", 1, "--lr", 1e-4, "--lr-decay-style", "constant"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", 0, "--log-interval", 1),
        *("--train-iters", _WARM_UP + _TIMED, "--eval-iters", 0, "--eval-interval", 1000),
        *("--overlap-grad-reduce", "--context-parallel-size", len(layout.gpus), "--hexi-plan", "plan.yaml"),
        *("--hexi-metrics", "rank-{rank}.jsonl"),
        *(() if setting.is_dry else ("--bf16",)),
    ]
    variables = [environment[gpu] for gpu in layout.gpus]
    return Ranks(own, entry, words, len(layout.gpus), variables)


def _measured(folder: Path) -> Row:
    """Seconds of the timed iterations on the slowest rank, and all losses."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank-*.jsonl"))
    ]
    steps = [max(line["seconds"] for line in lines) for lines in zip(*ranks, strict=True)][_WARM_UP:]
    losses = [line["loss"] for line in ranks[-1]]
    return {"seconds": statistics.median(steps), "all_seconds": steps, "losses": losses}


def _job(cluster: MixedCluster, setting: Setting) -> Job:
    model = _MODEL
    if setting.is_dry:
        model = replace(model, layers=1, hidden_size=64, heads=4, head_dim=16, ffn_hidden_size=128)
    return Job(
        model=model,
        seq_length=cluster.tokens,
        micro_batch_size=1,
        global_batch_size=1,
        precision="fp32" if setting.is_dry else "bf16",
        overlap_gradients=True,
    )
