"""The job of a loop other than Megatron-LM's, as the arguments that its plan is checked against."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.plan_arguments import check_interleaving, set_terms, take_plan
from megatron_hexi.megatron.session import given_plan
from megatron_hexi.megatron.stages.stage_arguments import as_one_rank
from megatron_hexi.options.layer_features import ARGUMENTS, DTYPES
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
        sections: further configurations whose fields are arguments of Megatron-LM, such as an
            `OptimizerConfig`; `start` sets in them what the plan decides.
        lora_rank: rank of the adapters that alone are trained; ``None``: all weights are.
        images: whether the loop encodes images, which a plan may divide.
    """

    model: Any
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sections: Sequence[Any] = ()
    lora_rank: int | None = None
    images: bool = False


class HeldJob(NamedTuple):
    """A job that its plan supports.

    Attributes:
        args: the job as arguments of Megatron-LM.
        settings: configuration, field and value of everything that the plan sets.
        replaced: a line for each option that the plan replaces.
    """

    args: Namespace
    settings: list[tuple[Any, str, Any]]
    replaced: list[str]

    def apply(self) -> list[tuple[Any, str, Any]]:
        """Set in the configurations what the plan decides, and return what it replaces, in the same form."""
        given = [(section, name, getattr(section, name)) for section, name, _ in self.settings]
        for section, name, value in self.settings:
            setattr(section, name, value)
        return given


class _Place(NamedTuple):
    """A field of a configuration that is an argument of Megatron-LM."""

    section: Any
    field: dataclasses.Field[Any]

    @property
    def value(self) -> Any:
        """Its value, with torch's types as Megatron's arguments name them."""
        value = getattr(self.section, self.field.name, None)
        return DTYPES.get(str(value), value)

    @property
    def is_stated(self) -> bool:
        factory = self.field.default_factory
        default = self.field.default if factory is dataclasses.MISSING else factory()
        return bool(self.value != DTYPES.get(str(default), default))


def hold_loop(plan: str | Path, job: LoopJob, device: torch.device, *, stages: bool = False) -> HeldJob:
    """Read a plan and check the job against it.

    Args:
        stages: whether the loop can train stages that have layers of their own.

    Raises:
        HexiError: the plan is wrong, was made for another job, or needs Megatron-LM's loop.
    """
    read = read_plan(plan)
    if not (read.is_repeated or stages):
        raise PlanError(
            f"{plan}: its stages have layers of their own, which need Megatron-LM's loop; train with python "
            "-m megatron_hexi.run, or make a plan with planner: {unequal_stages: false} in the cluster file"
        )
    args = parse_words((), "job").args
    places = _places((job.model, *job.sections), args)
    args, stated = _arguments(plan, job, places, args)
    before = dict(vars(args))
    held = take_plan(args, stated, device)
    if args.fp16:
        raise PlanError("fp16: its loss scale needs Megatron-LM's loop; train in bf16 or fp32")
    given = given_plan()
    assert given is not None, "the job has a plan"
    if given.fp8_recipe == "delayed":
        raise PlanError(
            "fp8_recipe delayed: Megatron-LM's loop alone saves its scales; train with tensorwise, blockwise "
            "or mxfp8"
        )
    with as_one_rank(args, given.mesh):
        pass
    args.hexi_overlap_values = False  # the loop does not say which step is its last
    settings = []
    for name, value in vars(args).items():
        if name in before and value == before[name]:
            continue
        is_ours = name in _OF_MEGATRON_LM or name.startswith("hexi_")
        if name in _OF_THE_LOOP or not (name in places or is_ours):
            place = "the model's configuration" if name in places else f"arguments={{{name!r}: {value!r}}}"
            raise PlanError(
                f"{plan}: trains with {name} {value}, which your loop has to carry out; let it do so, and "
                f"state this in {place}"
            )
        if name == "cp_comm_type":
            value = value[0]  # the argument is a list of words, the field one word or one for each layer
        if name not in _OF_MEGATRON_LM:
            settings += [(one.section, one.field.name, value) for one in places.get(name, ())]
    replicas, ranks = len(read.replicas), args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = 1 if given.mesh else args.world_size // (ranks * args.context_parallel_size)
    if job.global_batch_size % (job.micro_batch_size * args.data_parallel_size):
        raise PlanError(
            f"{plan}: {replicas} equal replicas cannot share a global batch of {job.global_batch_size} in "
            f"micro-batches of {job.micro_batch_size}; give another global_batch_size"
        )
    check_interleaving(args)
    set_terms(args)
    return HeldJob(args, settings, held.replaced)


def _places(sections: Sequence[Any], args: Namespace) -> dict[str, list[_Place]]:
    """Return the fields of configurations that are arguments of Megatron-LM or of its model, by argument."""
    places: dict[str, list[_Place]] = {}
    for section in sections:
        for one in dataclasses.fields(section):
            name = ARGUMENTS.get(one.name, one.name)
            if section is sections[0] or name in places or hasattr(args, name):
                places.setdefault(name, []).append(_Place(section, one))
    return places


def _arguments(
    plan: str | Path, job: LoopJob, places: Mapping[str, Sequence[_Place]], args: Namespace
) -> tuple[Namespace, set[str]]:
    """Return a job as Megatron-LM's arguments, and the flags that it states.

    Args:
        args: Megatron-LM's defaults.

    Raises:
        HexiError: the job states an argument that Megatron lacks, twice, or for Megatron-LM's loop alone.
    """
    sizes = {name: getattr(job, name) for name in ("seq_length", "micro_batch_size", "global_batch_size")}
    for name in job.arguments:
        if name in sizes or name in places:
            raise HexiError(f"arguments: {name} is a field of the job or its model; state it there, not here")
        if not hasattr(args, name):
            raise HexiError(f"arguments: Megatron has no argument {name}; correct or remove it")
        if name.startswith("hexi_") and name != "hexi_kernel":
            raise HexiError(f"--{name.replace('_', '-')}: needs Megatron-LM's loop; leave it out")
    values, stated = {}, set()
    for name, fields in places.items():
        own = [one for one in fields if one.is_stated]  # of several configurations one may leave it out
        known = [one.value for one in own or fields if one.value is not None]
        values[name] = known[0] if known else getattr(args, name, None)
        stated |= {name} if own else set()
    args = Namespace(**vars(args) | values | dict(job.arguments) | sizes)
    if all(one.value is None for one in places["num_query_groups"]):
        args.num_query_groups = args.num_attention_heads
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    activation = getattr(getattr(job.model, "activation_func", None), "__name__", None)
    args.quick_geglu = job.model.gated_linear_unit and activation == "quick_gelu"
    args.hexi_plan, args.lora_rank, args.hexi_images = str(plan), job.lora_rank, job.images
    if dist.is_initialized():
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    else:
        args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    stated |= {*job.arguments, *sizes}
    return args, {flag for row in read_rows() if row.dest in stated for flag in row.flags}
