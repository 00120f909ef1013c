"""``--hexi-plan``: the plan is read and held against the job before anything is allocated."""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.options import refuse_unsupported
from megatron_hexi.megatron.session import GivenPlan, set_given_plan
from megatron_hexi.plan import Plan, plan_digest, read_plan
from megatron_hexi.runtime import select_kernel


def take_plan(args: Namespace, given: set[str], device: torch.device) -> list[str]:
    """Read the job's plan, check it, and set the arguments that it decides.

    Args:
        args: Megatron's arguments, not yet checked; changed in place.
        given: the flags that the user wrote.
        device: of this rank's tensors.

    Returns:
        The flags that were set because the plan needs them and the user had not written them.

    Raises:
        HexiError: the plan is wrong, or was made for another job; with both values.
    """
    set_given_plan(None)
    if args.hexi_plan is None:
        if args.hexi_kernel != "auto":
            raise HexiError(
                f"--hexi-kernel {args.hexi_kernel}: chooses the kernel of a plan; give --hexi-plan too"
            )
        return []
    plan = read_plan(args.hexi_plan)
    refuse_unsupported(args)
    changed = _set_decided_arguments(args, given, plan)
    check_workload(args, plan)
    check_ranks(args, plan)
    kernel = select_kernel(args.hexi_kernel, device, _dtype(args), plan.workload.head_dim)
    row_multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    set_given_plan(GivenPlan(plan, args.hexi_plan, plan_digest(plan), kernel.name, row_multiple))
    return changed


def check_workload(args: Namespace, plan: Plan) -> None:
    """Hold the plan's workload against the model of the job.

    Raises:
        PlanError: they differ; with both values.
    """
    workload = plan.workload
    grouped = args.group_query_attention
    sizes = (
        ("seq_length", workload.seq_length, "--seq-length", args.seq_length or args.encoder_seq_length),
        ("heads", workload.heads, "--num-attention-heads", args.num_attention_heads),
        (
            "kv_heads",
            workload.kv_heads,
            "--num-query-groups",
            args.num_query_groups if grouped else args.num_attention_heads,
        ),
        (
            "head_dim",
            workload.head_dim,
            "--kv-channels",
            args.kv_channels or args.hidden_size // args.num_attention_heads,
        ),
        ("layers", workload.layers, "--num-layers", args.num_layers),
        ("hidden_size", workload.hidden_size, "--hidden-size", args.hidden_size),
        (
            "tensor_parallel",
            workload.tensor_parallel,
            "--tensor-model-parallel-size",
            args.tensor_model_parallel_size,
        ),
    )
    for name, planned, flag, found in sizes:
        if planned is not None and planned != found:
            raise PlanError(
                f"{args.hexi_plan}: workload.{name} is {planned}, the job has {flag} {found}; "
                "use a plan made for this job"
            )
    if not workload.causal:
        raise PlanError(
            f"{args.hexi_plan}: workload.causal is false, a GPT is causal; use a plan made for this job"
        )


def check_ranks(args: Namespace, plan: Plan) -> None:
    """Hold the plan's replicas against the ranks and the batch of the job.

    Raises:
        PlanError: they differ, or the plan deals ranks as Megatron's rectangle cannot.
    """
    path = args.hexi_plan
    sizes = [len(replica.domain.members) for replica in plan.replicas]
    if len(set(sizes)) > 1:
        raise PlanError(
            f"{path}: replicas have {', '.join(map(str, sizes))} ranks; give all of them the same number "
            "(unequal replicas are not carried out yet)"
        )
    if args.context_parallel_size != sizes[0]:
        raise PlanError(
            f"{path}: a replica has {sizes[0]} ranks, the job has --context-parallel-size "
            f"{args.context_parallel_size}; give --context-parallel-size {sizes[0]}, or leave it out"
        )
    for number, replica in enumerate(plan.replicas):
        ranks = [member.rank for member in replica.domain.members]
        first = number * sizes[0]
        if ranks != list(range(first, first + sizes[0])):
            raise PlanError(
                f"{path}: replicas[{number}] has the ranks {_short(ranks)}, Megatron deals it {first} to "
                f"{first + sizes[0] - 1}; number them so (ranks dealt by the plan are not carried out yet)"
            )
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    needed = plan.ranks * model
    if args.world_size != needed:
        raise PlanError(
            f"{path}: {len(plan.replicas)} replicas of {sizes[0]} ranks, tensor x pipeline parallel {model}, "
            f"are {needed} ranks, the job has {args.world_size}; start {needed} ranks or use another plan"
        )
    _check_shares(args, plan)


def _check_shares(args: Namespace, plan: Plan) -> None:
    """Replicas' shares of the global batch: equal ones only, and as large as the job's."""
    shares = [replica.micro_batches for replica in plan.replicas]
    stated = [share for share in shares if share is not None]
    if not stated:
        return
    if len(set(shares)) > 1:
        raise PlanError(
            f"{args.hexi_plan}: replicas take {', '.join(map(str, shares))} micro-batches; give all of them "
            "the same, or none (unequal shares are not carried out yet)"
        )
    if args.rampup_batch_size is not None:
        raise PlanError(
            f"{args.hexi_plan}: replicas state their micro_batches, the job has --rampup-batch-size; "
            "leave micro_batches out"
        )
    batch = args.global_batch_size
    sequences = sum(stated) * args.micro_batch_size
    if batch is not None and sequences != batch:
        raise PlanError(
            f"{args.hexi_plan}: {sum(stated)} micro-batches of {args.micro_batch_size} are {sequences} "
            f"sequences, the job has --global-batch-size {batch}; make the two equal"
        )


def _set_decided_arguments(args: Namespace, given: set[str], plan: Plan) -> list[str]:
    """Set what a plan decides, where the user said nothing else."""
    changed = []
    if "--context-parallel-size" not in given:
        args.context_parallel_size = len(plan.replicas[0].domain.members)
        changed.append(f"--context-parallel-size {args.context_parallel_size}")
    if not args.calculate_per_token_loss:
        # Ranks hold different numbers of tokens: only a mean over tokens is the mean of the batch.
        args.calculate_per_token_loss = True
        changed.append("--calculate-per-token-loss")
    if args.create_attention_mask_in_dataloader:
        # [S, S] values for each sequence, which the kernels do not read.
        args.create_attention_mask_in_dataloader = False
        changed.append("--no-create-attention-mask-in-dataloader")
    if args.seq_length is not None and args.encoder_seq_length is None:
        # Megatron copies the one to the other, and demands a multiple of 2 x context-parallel size of
        # the first only. Plans have no such rule.
        args.encoder_seq_length, args.seq_length = args.seq_length, None
    return changed


def _dtype(args: Namespace) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 6 else f"{ranks[0]}, {ranks[1]}, …, {ranks[-1]}"
