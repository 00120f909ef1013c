"""Combinations of kinds of models with features, each asked of the code that would train or plan it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.elastic.planning.survivors import survive
from megatron_hexi.elastic.store import ROUND_VARIABLE
from megatron_hexi.elastic.training.round import check_surviving
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Images, Job
from megatron_hexi.models.megatron_arguments import model_from_arguments
from megatron_hexi.models.vision import Vision
from megatron_hexi.options.parser import Parsed, parse_words
from megatron_hexi.options.plan_job import hold_job
from megatron_hexi.options.refusals import refuse_unsupported
from megatron_hexi.plan import Plan, plan_from_yaml, write_plan
from megatron_hexi.plan.units import job_ranks
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.replan.arguments import check_replanning
from megatron_hexi.shell.words import Word, unplaced
from megatron_hexi.yaml_file import yaml_from_text

_PLAN, _ARGUMENTS = "plan.yaml", Path("job.args")
_CLUSTER = Path(__file__).parents[1] / "testbed" / "four-equal.yaml"
_LAYERS, _LENGTH = 4, 64
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Kind:
    """A kind of model or data.

    Args:
        title: what readers call it.
        words: Megatron's arguments that make a model of this kind, beside those of a dense decoder.
        workload: what a plan's workload says otherwise for it.
        micro_batch: samples of a micro-batch where the feature does not need several.
        vision: its encoder of images, with which it trains in Megatron Bridge's loop.
    """

    title: str
    words: tuple[str, ...] = ()
    workload: Mapping[str, int] = field(default_factory=dict)
    micro_batch: int = 2
    vision: Vision | None = None


_DENSE = (
    *("--num-layers", str(_LAYERS), "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--vocab-size", "256"),
    *("--position-embedding-type", "rope", "--no-rope-fusion", "--max-position-embeddings", str(_LENGTH)),
    *("--seq-length", str(_LENGTH), "--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0"),
)
_GROUPED = ("--kv-channels", "32", "--group-query-attention", "--num-query-groups", "2")

KINDS: Final[Mapping[str, Kind]] = {
    "dense": Kind("Dense"),
    "window": Kind("Windows", ("--window-size", "15,0", "--window-attn-skip-freq", "2")),
    "sinks": Kind("Sinks", ("--softmax-type", "learnable")),
    "documents": Kind("Documents", ("--dataloader-inter-document-masking",), micro_batch=1),
    "latent": Kind(
        "Latent attention",
        (
            *("--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", "32", "--qk-head-dim", "16"),
            *("--qk-pos-emb-head-dim", "16", "--v-head-dim", "24"),
        ),
        {"kv_heads": 4, "value_dim": 24},
    ),
    "experts": Kind(
        "Experts",
        (
            *("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-router-topk", "2"),
            *("--moe-token-dispatcher-type", "alltoall"),
        ),
    ),
    "prediction": Kind("Multi-token prediction", ("--mtp-num-layers", "1")),
    "hybrid": Kind("Hybrids of attention and MLP", ("--hybrid-layer-pattern", "*-*-")),
    "mamba": Kind(
        "Mamba layers",
        (
            *("--hybrid-layer-pattern", "M*M-", "--mamba-num-heads", "8", "--mamba-head-dim", "32"),
            *("--mamba-num-groups", "2", "--mamba-state-dim", "16"),
        ),
    ),
    "convolution": Kind(
        "Short convolutions", ("--hybrid-layer-pattern", "C*C-", "--linear-conv-kernel-dim", "3")
    ),
    "delta": Kind(
        "Gated delta nets",
        (
            *("--hybrid-layer-pattern", "G*G-", "--linear-num-key-heads", "2"),
            *(
                "--linear-num-value-heads",
                "8",
                "--linear-key-head-dim",
                "16",
                "--linear-value-head-dim",
                "16",
            ),
        ),
    ),
    "images": Kind("Images", vision=Vision(2, hidden_size=32, heads=2, ffn_hidden_size=48, patch_values=96)),
}

_TOKENS = """\
    - groups:
      - segments: [[0, 64]]
        members: [{ranks: [0], tokens: 40, heads: [0, 3]}, {ranks: [1], tokens: 24, heads: [3, 4]}]
"""
_ONE_REPLICA = f"- stages:\n  - domains:\n{_TOKENS}"
_LAYERED_REPLICA = f"- stages:\n  - layers: [0, 4]\n    domains:\n{_TOKENS}"
_STAGES = """\
- stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - {layers: [1, 4], domains: [{ranks: [1]}]}
"""
_SAMPLES = """\
- stages:
  - {layers: [0, 1], domains: [{ranks: [0], samples: 3}, {ranks: [1], samples: 1}]}
  - {layers: [1, 4], domains: [{ranks: [2]}]}
"""
_MINISTAGES = """\
- stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0]}]}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [1]}]}
"""
_ALL = "offload: [parameters, optimizer, activations]"
_SECOND = "domains: [{ranks: [2]}]"


def _plan(kind: Kind, replicas: str, micro_batch: int) -> Plan:
    """Return a plan for a model of this kind, read as a user's file would be."""
    sizes = {"seq_length": _LENGTH, "heads": 4, "kv_heads": 2, "head_dim": 32, **kind.workload}
    if "layers:" in replicas:
        sizes |= {"layers": _LAYERS}
    workload = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    text = f"version: 2\nworkload: {{{workload}}}\njob: {{micro_batch_size: {micro_batch}}}\nreplicas:\n"
    return plan_from_yaml(yaml_from_text(Path(_PLAN), text + replicas))


def _words(kind: Kind, *more: str) -> tuple[str, ...]:
    heads = () if "--multi-latent-attention" in kind.words else _GROUPED
    return (*_DENSE, *heads, *kind.words, "--global-batch-size", "8", *more)


def _parsed(kind: Kind, *more: str) -> Parsed:
    return parse_words([Word(word, 0) for word in _words(kind, *more)], str(_ARGUMENTS))


def _hold(kind: Kind, plan: Plan, *more: str, stages: int = 1) -> Namespace:
    """Check the job against the plan, as every rank does before anything is allocated."""
    if kind.vision is not None:
        _hold_in_bridge(plan, stages, 2 if _VIRTUAL in more else None)
    args, given = _parsed(kind, *more)
    args.hexi_plan, args.rank, args.world_size = _PLAN, 0, job_ranks(plan, stages)
    hold_job(args, set(given), plan)
    refuse_unsupported(args, "script")
    return args


def _hold_in_bridge(plan: Plan, stages: int = 1, chunks: int | None = None, **arguments: object) -> None:
    """Check a job with images against the plan, as Megatron Bridge's loop does."""
    import torch
    from megatron.core.transformer import TransformerConfig

    from megatron_hexi.megatron.bridge_vision import refuse_vision
    from megatron_hexi.megatron.loop_job import LoopJob, hold_loop

    model = TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        pipeline_dtype=torch.float32,
    )
    model.expert_tensor_parallel_size = None  # which Bridge's providers leave open until the plan is held
    of_bridge = {"dist_ckpt_optim_fully_reshardable": True, "ckpt_fully_parallel_save": False}
    given = of_bridge | arguments
    job = LoopJob(model, _LENGTH, plan.job.micro_batch_size or 1, 8, given, images=True)
    place = {"RANK": "0", "WORLD_SIZE": str(job_ranks(plan, stages))}
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, place):
        write_plan(plan, _PLAN)
        hold_loop(_PLAN, job, torch.device("cpu"), stages=True)
    model.vision_config = Namespace()
    refuse_vision(Namespace(model=model))


def _start_bridge_in_round() -> None:
    """Start a job of Megatron Bridge as a rank of an elastic job."""
    import torch

    from megatron_hexi.megatron.bridge_job import hold_configuration

    with patch.dict(os.environ, {ROUND_VARIABLE: "0"}):
        hold_configuration(None, Namespace(), torch.device("cpu"))


def _trained(*layouts: str, micro_batch: int | None = None) -> Callable[[Kind], None]:
    """Return a question for training under the first of these layouts that takes the job."""

    def ask(kind: Kind) -> None:
        refusals = []
        for layout in layouts:
            try:
                _hold(kind, _plan(kind, layout, micro_batch or kind.micro_batch))
                return
            except HexiError as refusal:
                refusals.append(refusal)
        raise refusals[-1]

    return ask


def _interleaved(kind: Kind) -> None:
    flags = ("--pipeline-model-parallel-size", "2", _VIRTUAL, "1")
    _hold(kind, _plan(kind, _ONE_REPLICA, kind.micro_batch), *flags, stages=2)


def _replanned(kind: Kind) -> None:
    plan = _plan(kind, _ONE_REPLICA, kind.micro_batch)
    if kind.vision is not None:
        _hold_in_bridge(plan, hexi_replan_interval=10)
    args = _hold(kind, plan)
    args.hexi_replan_interval, args.hexi_replan_threshold = 10, 0.03
    args.hexi_cluster = str(_CLUSTER)
    check_replanning(args, plan)


def _job(kind: Kind) -> Job:
    words = _words(kind, "--micro-batch-size", str(kind.micro_batch))
    model = model_from_arguments(unplaced(words), _ARGUMENTS)
    images = None if kind.vision is None else Images(per_sequence=2, patches=64)
    return Job(replace(model, vision=kind.vision), _LENGTH, kind.micro_batch, precision="fp32", images=images)


@cache
def _cluster() -> Cluster:
    return read_cluster(_CLUSTER)


def _planned(kind: Kind) -> None:
    find_plan(Request(_job(kind), frozenset(CHOSEN)), _cluster().without([1]))


def _simulated(kind: Kind) -> None:
    job = _job(kind)
    layout = _ONE_REPLICA if job.model.experts is None else _STAGES
    simulate(_plan(kind, layout, kind.micro_batch), replace(job, data_parallel=1), _cluster(), range(2))


def _elastic(kind: Kind) -> None:
    """Ask training, and the planner for the nodes that are left when one of the two is lost."""
    if kind.vision is not None:
        _start_bridge_in_round()
    layout = _STAGES if "--num-experts" in kind.words else _ONE_REPLICA
    whole = replace(_plan(kind, layout, kind.micro_batch), gpus=(0, 1))
    args = _hold(kind, whole, "--save", "saved", "--save-interval", "10")
    args.hexi_cluster = str(_CLUSTER)
    check_surviving(args, set(), whole)
    words = _words(kind, "--micro-batch-size", str(kind.micro_batch))
    survive(whole, _cluster(), [("node-1", 0), ("node-1", 1)], words)


FEATURES: Final[Mapping[str, tuple[str, Callable[[Kind], object]]]] = {
    "domain": ("one replica", _trained(_ONE_REPLICA, _LAYERED_REPLICA)),
    "replicas": (
        "unequal replicas",
        _trained(
            f"{_ONE_REPLICA}- stages:\n  - {_SECOND}\n",
            f"{_LAYERED_REPLICA}- stages:\n  - {{layers: [0, 4], {_SECOND}}}\n",
        ),
    ),
    "stages": ("stages", _trained(_STAGES)),
    "samples": ("samples", _trained(_SAMPLES, micro_batch=4)),
    "ministages": ("mini&shy;stages", _trained(_MINISTAGES)),
    "offload": ("offload", _trained(_MINISTAGES.replace("domains", f"{_ALL}, domains"))),
    "interleaving": ("inter&shy;leaving", _interleaved),
    "planner": ("planner", _planned),
    "simulator": ("simu&shy;lator", _simulated),
    "re-planning": ("re-planning", _replanned),
    "elastic": ("elastic", _elastic),
    "checkpoints": ("check&shy;points", _trained(_ONE_REPLICA)),
}


@cache
def refusal(kind: str, feature: str) -> str | None:
    """Return what the code says when it is asked for a combination; ``None`` if it takes it.

    Args:
        kind: a key of `KINDS`.
        feature: a key of `FEATURES`.
    """
    try:
        FEATURES[feature][1](KINDS[kind])
    except HexiError as error:
        return str(error)
    return None
