"""``--hexi-plan`` and ``--hexi-batch-shares``, checked against the job before anything is allocated."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

from megatron_hexi.elastic.store import in_round
from megatron_hexi.elastic.training.round import check_surviving, take_part
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.kinds.states import layers_with_state, state_option
from megatron_hexi.megatron.kernel_choice import choose_kernel
from megatron_hexi.megatron.loss_scale import scales_losses
from megatron_hexi.megatron.metrics_interval import set_metrics_interval
from megatron_hexi.megatron.session import GivenPlan, TrainingTerms, given_plan, set_given_plan
from megatron_hexi.mesh import Mesh
from megatron_hexi.options.job_terms import keep_vocabulary
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.options.plan_job import PER_TOKEN, Held, hold_job, replica_shares
from megatron_hexi.plan import Plan, plan_digest, read_plan
from megatron_hexi.plan.terms import Fp8Recipe, fp8_row_multiple
from megatron_hexi.record import open_record
from megatron_hexi.replan.arguments import check_replanning

#: Options of which each works under a plan alone: the value where it is not given, and what it does.
_NEED_A_PLAN = {
    "hexi_kernel": ("auto", "chooses the kernel of a plan"),
    "hexi_record": (None, "records a run under a plan"),
    "hexi_replan_interval": (None, "re-plans a plan"),
    "hexi_cluster": (None, "is for re-planning a plan"),
    "hexi_batch_shares": (False, "needs the units of a plan"),
    "hexi_metrics_interval": (None, "measures a run under a plan"),
}

_SHARES = "--hexi-batch-shares"


def take_plan(args: Namespace, given: set[str], device: torch.device) -> Held:
    """Read the job's plan, check it, and set the arguments that it decides.

    Args:
        args: Megatron's arguments, not yet checked; changed in place.

    Returns:
        Flags that were set because the plan needs them and the user had not written them.

    Raises:
        HexiError: the plan is wrong, or was made for another job; the message has both values.
    """
    set_given_plan(None)
    if in_round() and args.hexi_plan is None:
        raise HexiError(
            "megatron_hexi.elastic: re-plans after a node failure; give --hexi-plan plan.yaml to begin with"
        )
    if args.hexi_plan is None:
        refuse_without_plan(args)
        return Held([], [])
    plan = read_plan(args.hexi_plan)
    if in_round():
        check_surviving(args, given, plan)
        first, plan = plan, take_part(args)
        keep_vocabulary(args, first, plan)
        # In Megatron's default format the optimizer's state could be loaded under the same layout alone.
        args.dist_ckpt_optim_fully_reshardable = True
    held = hold_job(args, given, plan)
    check_replanning(args, plan)
    check_batch_shares(args, plan)
    set_metrics_interval(args, plan, on_gpu=device.type == "cuda")
    shares = replica_shares(args, plan)
    if args.deterministic_mode:
        # Megatron does so when it checks its arguments, which is later; the choice of a kernel depends on it.
        torch.use_deterministic_algorithms(True)
    kernel, digest = choose_kernel(args, plan, device, _dtype(args)), plan_digest(plan)
    if not args.hexi_batch_shares:
        plan = replace(plan, rates=None)
    fp8_format: str | None = args.fp8
    recipe: Fp8Recipe | None = args.fp8_recipe if fp8_format else None
    mesh = Mesh.of(plan, args.micro_batch_size, args.sequence_parallel, recipe)
    width = mesh.units[args.rank].width if mesh else args.tensor_model_parallel_size
    unit = mesh.units[args.rank] if mesh else plan.members[args.rank % plan.ranks // width]
    parts = width if args.sequence_parallel else 1
    multiple = fp8_row_multiple(None if unit.precision else recipe, parts)
    if unit.precision:
        args.fp8 = None  # so Megatron builds this rank's layers as in a job in bf16
    if args.hexi_record is not None and args.rank == 0:
        open_record(Path(args.hexi_record))
    set_given_plan(
        GivenPlan(
            *(plan, args.hexi_plan, digest, kernel.name, multiple, shares, mesh),
            fp8_format=fp8_format,
            fp8_recipe=recipe,
            scales_mean=PER_TOKEN in held.added,
        )
    )
    return held


def refuse_without_plan(args: Namespace) -> None:
    """Refuse options that say how a plan is carried out in a job without one."""
    for name, (default, reason) in _NEED_A_PLAN.items():
        value = getattr(args, name)
        if value != default:
            option = f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else "")
            raise HexiError(f"{option}: {reason}; add --hexi-plan, or leave this option out")


def set_terms(args: Namespace) -> None:
    """Give the plan's session the job's terms, of arguments that Megatron has checked."""
    given = given_plan()
    if given is None:
        return

    def overlaps_values() -> bool:
        return bool(args.hexi_overlap_values) and args.curr_iteration + 1 < args.train_iters

    further = args.mtp_num_layers or 0
    terms = TrainingTerms(
        layers=args.num_layers + further,
        further_layers=further,
        experts=args.num_experts,
        has_documents=is_packed(args),
        has_axes=args.position_embedding_type == "mrope",
        # Megatron saves the state of an external loader, which would be one ahead.
        reads_ahead=args.dataloader_type != "external",
        scales_losses=scales_losses(args),
        bucket_size=args.ddp_bucket_size,
        buckets=args.ddp_num_buckets,
        overlaps_values=overlaps_values,
    )
    set_given_plan(replace(given, terms=terms))


def check_interleaving(args: Namespace) -> None:
    """Check that an interleaved pipeline can run each replica's micro-batches.

    It runs micro-batches in groups; Megatron would fail late, and on the ranks of one replica alone. Between
    two stages activations and gradients go the same way, and only overlapped communication tells them apart:
    Megatron-LM refuses the other one, but Megatron Bridge trains with mixed-up rows.

    Raises:
        PlanError: a replica takes too few micro-batches, or leaves too few for its last group; or two stages
            do not overlap their communication.
    """
    given = given_plan()
    if given is None or args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    if stages == 2 and not args.overlap_p2p_comm:
        raise PlanError(
            "overlap_p2p_comm False: of two interleaved stages each would take gradients for activations; "
            "give overlap_p2p_comm True and batch_p2p_comm False"
        )
    group = args.microbatch_group_size_per_vp_stage or stages
    if given.shares is not None:
        counts = {f"replicas[{number}]": share.count for number, share in enumerate(given.shares)}
    elif args.rampup_batch_size is None:
        of_all = args.global_batch_size // args.micro_batch_size
        counts = {"each replica": of_all // args.data_parallel_size}
    else:  # Megatron checks each of the batches
        return
    for replica, count in counts.items():
        if count < group or 0 < count % group < stages:
            raise PlanError(
                f"{given.path}: {replica} takes {count} micro-batches, an interleaved pipeline runs {group} "
                f"at a time; give every replica a multiple of {group}"
            )


def _dtype(args: Namespace) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def check_batch_shares(args: Namespace, plan: Plan) -> None:
    """Refuse jobs that cannot have different rows in every batch.

    Raises:
        HexiError: the message has the flag and the remedy.
    """
    if not args.hexi_batch_shares:
        return
    if not is_packed(args):
        raise HexiError(
            f"{_SHARES}: shares out documents, and each sequence of the job is one document; add "
            f"--dataloader-inter-document-masking or --sft, or leave {_SHARES} out"
        )
    if in_round():
        raise HexiError(
            f"{_SHARES}: is not supported in elastic jobs: a plan made after a node failure does not say "
            f"how fast its units are; start with torchrun, or leave {_SHARES} out"
        )
    if plan.rates is None:
        raise HexiError(
            f"{_SHARES}: {args.hexi_plan} does not say how fast its units are; make a plan with "
            f"hexi plan --batch-shares, or leave {_SHARES} out"
        )
    if args.hexi_replan_interval is not None:
        raise HexiError(
            f"{_SHARES}: does not work with --hexi-replan-interval, which reads ranks' speeds from times of "
            "equal work; leave one of them out"
        )
    letters = layers_with_state(args)
    if letters:
        raise HexiError(
            f"{_SHARES}: does not work with {state_option(args)} of layers {letters}: they have the plan's "
            "heads in every batch; leave one of them out"
        )
