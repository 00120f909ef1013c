"""The job of a loop other than Megatron-LM's, as the arguments that its plan is checked against."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.plan_arguments import check_interleaving, set_terms, take_plan
from megatron_hexi.options.layer_features import ARGUMENTS
from megatron_hexi.options.parser import parse_words, read_rows
from megatron_hexi.plan import read_plan

#: Arguments that a plan changes for Megatron-LM's loop alone.
_OF_MEGATRON_LM: Final = ("seq_length", "encoder_seq_length", "create_attention_mask_in_dataloader")
#: Fields of a model's configuration that go with weights and optimizers of the loop.
_OF_THE_LOOP: Final = ("bf16", "fp16")


@dataclasses.dataclass(frozen=True)
class LoopJob:
    """A model and its batch, as a loop trains them.

    Args:
        model: a `TransformerConfig`; `start` sets in it what the plan decides, such as context_parallel_size.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch, on each replica.
        global_batch_size: sequences of an iteration, on all replicas.
        arguments: what else the loop carries out, as arguments of Megatron-LM by name, for example
            ``{"use_distributed_optimizer": True}``; with documents in a sequence
            ``{"dataloader_inter_document_masking": True}``.
    """

    model: Any
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def hold_loop(plan: str | Path, job: LoopJob, device: torch.device) -> tuple[Namespace, dict[str, Any]]:
    """Read a plan and check the job against it.

    Returns:
        The job as arguments of Megatron-LM, and the fields of its model that the plan sets.

    Raises:
        HexiError: the plan is wrong, was made for another job, or needs Megatron-LM's loop.
    """
    read = read_plan(plan)
    if not read.is_repeated:
        raise PlanError(
            f"{plan}: its stages have layers of their own, which need Megatron-LM's loop; train with python "
            "-m megatron_hexi.run, or make a plan with planner: {unequal_stages: false} in the cluster file"
        )
    names = {ARGUMENTS.get(one.name, one.name): one for one in dataclasses.fields(job.model)}
    args, given = _arguments(plan, job, names)
    before = dict(vars(args))
    take_plan(args, given, device)
    if args.fp16:
        raise PlanError("fp16: its loss scale needs Megatron-LM's loop; train in bf16 or fp32")
    changed = {name: getattr(args, name) for name in before if getattr(args, name) != before[name]}
    for name, value in changed.items():
        if name in _OF_THE_LOOP or not (name in names or name in _OF_MEGATRON_LM or name.startswith("hexi_")):
            place = "the model's configuration" if name in names else f"arguments={{{name!r}: {value!r}}}"
            raise PlanError(
                f"{plan}: trains with {name} {value}, which only the loop can carry out; do so, and state it "
                f"in {place}"
            )
    replicas, ranks = len(read.replicas), args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = args.world_size // (ranks * args.context_parallel_size)
    if job.global_batch_size % (job.micro_batch_size * args.data_parallel_size):
        raise PlanError(
            f"{plan}: {replicas} equal replicas cannot share a global batch of {job.global_batch_size} in "
            f"micro-batches of {job.micro_batch_size}; give another global_batch_size"
        )
    check_interleaving(args)
    set_terms(args)
    return args, {names[name].name: value for name, value in changed.items() if name in names}


def _arguments(
    plan: str | Path, job: LoopJob, names: Mapping[str, dataclasses.Field[Any]]
) -> tuple[Namespace, set[str]]:
    """Return a job as Megatron-LM's arguments, and the flags that it states.

    Args:
        names: fields of the model's configuration, by the argument of the same meaning.

    Raises:
        HexiError: the job states an argument that Megatron lacks, twice, or for Megatron-LM's loop alone.
    """
    args = parse_words((), "job").args
    sizes = {name: getattr(job, name) for name in ("seq_length", "micro_batch_size", "global_batch_size")}
    for name in job.arguments:
        if name in sizes or name in names:
            raise HexiError(f"arguments: {name} is a field of the job or its model; state it there alone")
        if not hasattr(args, name):
            raise HexiError(f"arguments: {name} is no argument of Megatron; correct or remove it")
        if name.startswith("hexi_") and name != "hexi_kernel":
            raise HexiError(f"arguments: {name} needs Megatron-LM's loop; leave it out")
    values = {name: getattr(job.model, one.name) for name, one in names.items()}
    stated = {name for name, one in names.items() if values[name] != one.default}
    args = Namespace(**vars(args) | values | dict(job.arguments) | sizes)
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    args.hexi_plan, args.rank, args.world_size = str(plan), dist.get_rank(), dist.get_world_size()
    stated |= {*job.arguments, *sizes}
    return args, {flag for row in read_rows() if row.dest in stated for flag in row.flags}
