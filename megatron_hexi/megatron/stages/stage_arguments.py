"""Megatron's arguments where stages differ: checked for one rank, then set to each rank's own stage.

Megatron derives the batch, the learning rate's schedule and the samples consumed from one rectangle of ranks.
With one replica of one rank they are right for any stages.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from megatron_hexi.kinds.states import hybrid_layers
from megatron_hexi.mesh import Mesh, job_experts
from megatron_hexi.options.job_terms import vocabulary_step
from megatron_hexi.plan import Plan
from megatron_hexi.plan.flags import argument_name
from megatron_hexi.plan.recompute import recompute_settings
from megatron_hexi.plan.units import Unit


@contextlib.contextmanager
def as_one_rank(args: Namespace, mesh: Mesh | None) -> Iterator[None]:
    """Let Megatron check the arguments as those of a job of one rank, then set those of this rank's stage.

    Args:
        args: Megatron's arguments; changed in place.
        mesh: the units of all ranks; ``None``: nothing is changed.
    """
    if mesh is None:
        yield
        return
    world_size, sequence_parallel = args.world_size, args.sequence_parallel
    # Without tensor parallelism Megatron resets sequence parallelism with a warning.
    args.world_size, args.sequence_parallel = 1, False
    yield
    args.world_size = world_size
    args.sequence_parallel = sequence_parallel
    # The plan's shares divide and gather what Megatron's distributed optimizer divides evenly.
    args.hexi_overlap_values = args.overlap_param_gather
    args.overlap_param_gather = False
    args.dist_ckpt_optim_fully_reshardable = True
    _set_view(args, mesh.plan, mesh.units[args.rank])


def _set_view(args: Namespace, plan: Plan, unit: Unit) -> None:
    """Set the arguments that describe a rank's stage to Megatron."""
    width = unit.width
    slices = job_experts(plan, args.num_experts)[unit.ranks[0]][1].parts if args.num_experts else width
    args.tensor_model_parallel_size = width
    for name, size in (
        ("expert_tensor_parallel_size", slices),
        ("tensor_parallel_num_weight_shards", width),
        ("expert_tensor_parallel_num_weight_shards", slices),
    ):
        if getattr(args, name, None) is not None:
            setattr(args, name, size)
    args.sequence_parallel = args.sequence_parallel and width > 1
    args.context_parallel_size = len(unit.domain.members)
    args.pipeline_model_parallel_size = unit.depth
    replica = plan.replicas[unit.replica]
    cuts = [replica.ministage_layers(stage) for stage in range(unit.depth)]
    pattern = hybrid_layers(args)
    if pattern:
        args.hexi_pattern = pattern  # checkpoints have the whole model's
        letters = ("".join(pattern[start:stop] for start, stop in ministages) for ministages in cuts)
        args.hybrid_layer_pattern = "|".join(letters)
    elif unit.depth > 1:
        cells = ["t" * sum(stop - start for start, stop in ministages) for ministages in cuts]
        heads = "m" * (args.mtp_num_layers or 0)
        cells[0], cells[-1] = f"E{cells[0]}", f"{cells[-1]}{heads}L"
        args.pipeline_model_parallel_layout = "|".join(cells)
    args.make_vocab_size_divisible_by = vocabulary_step(plan, args.make_vocab_size_divisible_by) // width
    if recompute := unit.recompute or plan.job.recompute:
        for flag, value in recompute_settings(recompute).items():
            setattr(args, argument_name(flag), value)
    # Ranks that hold the same weights are not one group here, so they cannot share the writing.
    args.ckpt_fully_parallel_save = args.ckpt_fully_parallel_load = False
