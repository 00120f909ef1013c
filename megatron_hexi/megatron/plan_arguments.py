"""``--hexi-plan``: the plan is read and held against the job before anything is allocated."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.batch_shares import check_batch_shares
from megatron_hexi.megatron.job_terms import set_job_terms
from megatron_hexi.megatron.kernel_choice import choose_kernel
from megatron_hexi.megatron.metrics_interval import set_metrics_interval
from megatron_hexi.megatron.options import refuse_unsupported
from megatron_hexi.megatron.options.kinds import PlanKind
from megatron_hexi.megatron.replan_arguments import check_replanning
from megatron_hexi.megatron.session import GivenPlan, given_plan, set_given_plan
from megatron_hexi.megatron.stages.arguments import check_stages
from megatron_hexi.megatron.surviving import check_surviving, take_part
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import (
    Plan,
    Share,
    deal_micro_batches,
    has_equal_replicas,
    plan_digest,
    read_plan,
    require_repeated,
)
from megatron_hexi.record import open_record
from megatron_hexi.runtime.rounds import in_round

_PER_TOKEN = "--calculate-per-token-loss"


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
    if in_round() and args.hexi_plan is None:
        raise HexiError("megatron_hexi.elastic: plans anew after a loss; give --hexi-plan plan.yaml too")
    if args.hexi_plan is None:
        if args.hexi_kernel != "auto":
            raise HexiError(
                f"--hexi-kernel {args.hexi_kernel}: chooses the kernel of a plan; give --hexi-plan too"
            )
        if args.hexi_record is not None:
            raise HexiError(
                f"--hexi-record {args.hexi_record}: records a run under a plan; give --hexi-plan too, or "
                "--hexi-metrics instead"
            )
        check_replanning(args, None)
        check_batch_shares(args, None)
        set_metrics_interval(args, None, on_gpu=device.type == "cuda")
        return []
    plan = read_plan(args.hexi_plan)
    if in_round():
        check_surviving(args, given, plan)
        plan = take_part(args)
    stages = not plan.is_repeated
    stated = set_job_terms(args, given, plan)
    kind: PlanKind = "stages" if stages else "any" if has_equal_replicas(plan) else "unequal"
    refuse_unsupported(args, kind)
    if stages:
        check_stages(args, given, plan)
    else:
        require_repeated(plan, "train by")
    changed = [*stated, *_set_decided_arguments(args, given, plan)]
    check_workload(args, plan)
    if not stages:
        check_ranks(args, plan)
    check_replanning(args, plan)
    check_batch_shares(args, plan)
    set_metrics_interval(args, plan, on_gpu=device.type == "cuda")
    shares = take_shares(args, plan)
    if args.deterministic_mode:
        # Megatron does so when it checks its arguments, which is later; the choice of a kernel goes by it.
        torch.use_deterministic_algorithms(True)
    kernel = choose_kernel(args, plan, device, _dtype(args))
    mesh = Mesh(plan, args.micro_batch_size, args.sequence_parallel) if stages else None
    width = len(mesh.member(mesh.places[args.rank]).ranks) if mesh else args.tensor_model_parallel_size
    row_multiple = width if args.sequence_parallel else 1
    if args.hexi_record is not None and args.rank == 0:
        open_record(Path(args.hexi_record))
    set_given_plan(
        GivenPlan(
            *(plan, args.hexi_plan, plan_digest(plan), kernel.name, row_multiple, shares, mesh),
            rates=plan.rates if args.hexi_batch_shares else None,
            scales_mean=_PER_TOKEN in changed,
        )
    )
    return changed


def check_workload(args: Namespace, plan: Plan) -> None:
    """Hold the plan's workload against the model of the job.

    Raises:
        PlanError: they differ; with both values.
    """
    workload = plan.workload
    grouped = args.group_query_attention
    latent = args.multi_latent_attention
    key_dim, key_flag = args.kv_channels or args.hidden_size // args.num_attention_heads, "--kv-channels"
    if latent:
        key_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
        key_flag = "--qk-head-dim and --qk-pos-emb-head-dim with a sum of"
    sizes = (
        ("seq_length", workload.seq_length, "--seq-length", args.seq_length or args.encoder_seq_length),
        ("heads", workload.heads, "--num-attention-heads", args.num_attention_heads),
        (
            "kv_heads",
            workload.kv_heads,
            "--num-query-groups",
            args.num_query_groups if grouped and not latent else args.num_attention_heads,
        ),
        (
            "head_dim",
            workload.head_dim,
            key_flag,
            key_dim,
        ),
        ("value_dim", workload.value_size, "--v-head-dim", args.v_head_dim if latent else key_dim),
        ("layers", workload.layers, "--num-layers", args.num_layers),
        ("hidden_size", workload.hidden_size, "--hidden-size", args.hidden_size),
        (
            "tensor_parallel",
            workload.tensor_parallel if plan.is_repeated else None,
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
    """Hold the plan's ranks against those of the job.

    Raises:
        PlanError: they differ; with both values.
    """
    path, size = args.hexi_plan, _context_parallel_size(plan)
    if args.context_parallel_size != size:
        what = (
            f"a replica has {size} ranks"
            if has_equal_replicas(plan)
            else f"unequal replicas lie in one context-parallel group of all {size} ranks"
        )
        raise PlanError(
            f"{path}: {what}, the job has --context-parallel-size {args.context_parallel_size}; give "
            f"--context-parallel-size {size}, or leave it out"
        )
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    needed = plan.units * model
    if args.world_size != needed:
        sizes = " + ".join(str(len(replica.domain.members)) for replica in plan.replicas)
        raise PlanError(
            f"{path}: replicas of {sizes} ranks, tensor x pipeline parallel {model}, are {needed} ranks, the "
            f"job has {args.world_size}; start {needed} ranks or use another plan"
        )


def take_shares(args: Namespace, plan: Plan) -> tuple[Share, ...] | None:
    """Deal the micro-batches of a global batch to the replicas.

    Args:
        args: Megatron's arguments, with a global batch size.
        plan: the plan.

    Returns:
        What each replica takes; ``None`` where replicas are equal, and Megatron deals them.

    Raises:
        PlanError: the batch is not the plan's.
    """
    if not _deals_micro_batches(plan):
        return None
    path = args.hexi_plan
    try:
        shares = deal_micro_batches(plan, args.global_batch_size, args.micro_batch_size)
    except PlanError as problem:
        raise PlanError(
            f"{path}: {problem} (--global-batch-size {args.global_batch_size}, --micro-batch-size "
            f"{args.micro_batch_size})"
        ) from None
    return None if plan.is_repeated and has_equal_replicas(plan) else shares


def check_interleaving(args: Namespace) -> None:
    """Check that an interleaved pipeline can run what each replica takes.

    It runs micro-batches in groups; Megatron would find out on the ranks of one replica alone, and late.

    Args:
        args: Megatron's arguments, checked by Megatron.

    Raises:
        PlanError: a replica takes too few micro-batches, or leaves too few for its last group.
    """
    given = given_plan()
    if given is None or given.shares is None or args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    for number, share in enumerate(given.shares):
        if share.count < group or 0 < share.count % group < stages:
            raise PlanError(
                f"{given.path}: replicas[{number}] takes {share.count} micro-batches, an interleaved "
                f"pipeline runs {group} at a time; give every replica a multiple of {group}"
            )


def _deals_micro_batches(plan: Plan) -> bool:
    """Whether the plan says anything of the batch."""
    stated = any(replica.micro_batches is not None for replica in plan.replicas)
    return stated or not plan.is_repeated or not has_equal_replicas(plan)


def _context_parallel_size(plan: Plan) -> int:
    """Megatron's; unequal replicas do not fit its rectangle, and lie in one group together."""
    return len(plan.replicas[0].domain.members) if has_equal_replicas(plan) else plan.units


def _set_decided_arguments(args: Namespace, given: set[str], plan: Plan) -> list[str]:
    """Set what a plan decides, where the user said nothing else."""
    changed = []
    if plan.is_repeated and "--context-parallel-size" not in given:
        args.context_parallel_size = _context_parallel_size(plan)
        changed.append(f"--context-parallel-size {args.context_parallel_size}")
    if not args.calculate_per_token_loss:
        # Ranks hold different numbers of tokens: only a mean over tokens is the mean of the batch.
        args.calculate_per_token_loss = True
        changed.append(_PER_TOKEN)
    if args.create_attention_mask_in_dataloader:
        # [S, S] values for each sequence, which the kernels do not read.
        args.create_attention_mask_in_dataloader = False
        changed.append("--no-create-attention-mask-in-dataloader")
    changed += _set_global_batch(args, plan)
    if args.seq_length is not None and args.encoder_seq_length is None:
        # Megatron copies the one to the other, and demands a multiple of 2 x context-parallel size of
        # the first only. Plans have no such rule.
        args.encoder_seq_length, args.seq_length = args.seq_length, None
    return changed


def _set_global_batch(args: Namespace, plan: Plan) -> list[str]:
    """Set the global batch size where the plan states it and the user does not.

    Raises:
        PlanError: the batch grows during training, and what replicas take of it does not.
    """
    if not _deals_micro_batches(plan):
        return []
    if getattr(args, "step_batch_size_schedule", None) is not None:  # not in 0.17
        raise PlanError(
            f"{args.hexi_plan}: replicas take the same micro-batches of every global batch, the job has "
            "--step-batch-size-schedule; leave it out, or make the replicas equal and leave micro_batches out"
        )
    if args.micro_batch_size is None or args.micro_batch_size < 1:
        raise PlanError(
            f"{args.hexi_plan}: replicas take whole micro-batches, the job has --micro-batch-size "
            f"{args.micro_batch_size}; give 1 or more"
        )
    if args.global_batch_size is not None:
        return []
    stated = [replica.micro_batches for replica in plan.replicas if replica.micro_batches is not None]
    if len(stated) not in (0, len(plan.replicas)):
        raise PlanError(
            f"{args.hexi_plan}: not every replica states its micro_batches; give --global-batch-size"
        )
    args.global_batch_size = (sum(stated) or len(plan.replicas)) * args.micro_batch_size
    return [f"--global-batch-size {args.global_batch_size}"]


def _dtype(args: Namespace) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
