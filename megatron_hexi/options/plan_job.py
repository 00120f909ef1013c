"""Check the model, ranks, stages and batch of a job against the job's plan."""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple

from megatron_hexi.errors import PlanError, raise_all
from megatron_hexi.kinds.states import check_state_heads, hybrid_layers, layers_with_state, state_option
from megatron_hexi.options.job_terms import (
    PARALLEL_SIZES,
    STAGE_FLAGS,
    check_experts,
    set_job_terms,
    tensor_parallel_flag,
)
from megatron_hexi.options.kinds import PlanKind, is_packed
from megatron_hexi.options.layer_features import layers_by_state
from megatron_hexi.options.parser import is_assumed
from megatron_hexi.options.refusals import find_refused, refuse_unsupported, replace_options
from megatron_hexi.plan import (
    Plan,
    Share,
    Workload,
    assign_micro_batches,
    has_equal_replicas,
    require_repeated,
)
from megatron_hexi.plan.flags import argument_name
from megatron_hexi.plan.heads import divided_domain
from megatron_hexi.plan.recompute import Again, recompute_settings, stated_recompute
from megatron_hexi.plan.units import domain_rows

PER_TOKEN = "--calculate-per-token-loss"


def kind_of(plan: Plan) -> PlanKind:
    """Return the kind of a plan: `stages` if its stages state their layers, else `unequal` or `any`."""
    if not plan.is_repeated:
        return "stages"
    return "any" if has_equal_replicas(plan) else "unequal"


class Held(NamedTuple):
    """Flags that a plan needs and the user had not written, and a line for each option that it replaces."""

    added: list[str]
    replaced: list[str]


def hold_job(args: Namespace, given: set[str], plan: Plan) -> Held:
    """Check a job against its plan, and set the arguments that the plan decides.

    Each rank calls this function in training, and ``hexi launch`` before it prints command lines.

    Args:
        args: Megatron's arguments, before Megatron's own checks, with ``world_size`` and ``hexi_plan``;
            changed in place.
    """
    stated = set_job_terms(args, given, plan)
    replaced = replace_options(args, kind_of(plan))
    refuse_unsupported(args, kind_of(plan))
    check_precision(args, plan)
    refuse_images(args, plan)
    if plan.is_repeated:
        require_repeated(plan, "train by")
    else:
        check_stages(args, given, plan)
    changed = [*stated, *_set_decided_arguments(args, given, plan)]
    check_workload(args, plan)
    check_recomputation(args, plan)
    if plan.is_repeated:
        check_ranks(args, plan)
    return Held(changed, replaced)


def check_precision(args: Namespace, plan: Plan) -> None:
    """Check that a job in fp8 has layers that fp8 is tested with, and other jobs no unit with a precision."""
    others = set(hybrid_layers(args)) - set("*-E|") | set(layers_with_state(args))
    if args.fp8 and others:
        raise PlanError(
            f"--fp8-format: it is not tested with layers {', '.join(sorted(others))}; train in bf16, or "
            "without these layers"
        )
    stated = [member for member in plan.members if member.precision is not None]
    if stated and not args.fp8:
        raise PlanError(
            f"{args.hexi_plan}: ranks {list(stated[0].ranks)} have precision: {stated[0].precision}, and the "
            "job is not in fp8; give --fp8-format and --fp8-recipe, or leave precision out of the plan"
        )


def refuse_images(args: Namespace, plan: Plan) -> None:
    """Refuse a plan that divides images, or has a stage for them alone, in a job that has none."""
    units = ((stage.layers, member) for stage in plan.stages for member in stage.members)
    stated = [one for layers, one in units if one.patches is not None or layers == (0, 0)]
    if stated and not getattr(args, "hexi_images", False):
        what = "layers: [0, 0]" if (patches := stated[0].patches) is None else f"patches: {patches}"
        raise PlanError(
            f"{args.hexi_plan}: ranks {list(stated[0].ranks)} have {what}, and the job encodes no images; "
            "make a plan without images"
        )


def check_stages(args: Namespace, given: set[str], plan: Plan) -> None:
    """Check a job against a plan whose stages state their layers."""
    path = args.hexi_plan
    if sizes := [flag for flag in (*PARALLEL_SIZES, *STAGE_FLAGS) if flag in given]:
        raise PlanError(
            f"{', '.join(sizes)} {'does' if len(sizes) == 1 else 'do'} not work with --hexi-plan {path}, "
            "whose stages say which ranks and layers they have; "
            f"leave {'it' if len(sizes) == 1 else 'them'} out"
        )
    if args.world_size != plan.ranks:
        raise PlanError(
            f"{path}: the plan numbers {plan.ranks} ranks, but the job has {args.world_size}; start "
            f"{plan.ranks} ranks or use another plan"
        )
    loss_ranks = {max(m.ranks) for replica in plan.replicas for m in replica.stages[-1].members}
    if plan.ranks - 1 not in loss_ranks:
        raise PlanError(
            f"{path}: rank {plan.ranks - 1}, the job's last, logs the loss and does not compute it; put this "
            "rank into the last stage of a replica, as the highest rank of its unit"
        )
    ends = [stage for replica in plan.replicas for stage in (replica.stages[0], replica.stages[-1])]
    if not any(0 in member.ranks for stage in ends for member in stage.members):
        raise PlanError(
            f"{path}: rank 0 is in a stage that reads no data, and has to know whether there is any; put "
            "rank 0 into the first or the last stage of a replica"
        )
    if plan.has_offload and getattr(args, "async_save", False):
        raise PlanError(
            f"{path}: its stages offload, and --async-save writes host memory while the next step changes "
            "it; leave out --async-save, or offload: in the plan"
        )
    if plan.takes_micro_batches and is_packed(args):
        raise PlanError(
            f"{path}: domains that take whole micro-batches do not support documents yet; leave out "
            "--dataloader-inter-document-masking and --sft, or give the domains samples"
        )
    size = args.ffn_hidden_size
    for member in plan.members:
        width = len(member.ranks)
        if size is not None and size % width:
            raise PlanError(
                f"{path}: ranks {list(member.ranks)} cut each weight in {width}, which does not divide "
                f"--ffn-hidden-size {size}; give the unit another number of ranks"
            )
    check_experts(args, plan)


def check_workload(args: Namespace, plan: Plan) -> None:
    """Check the plan's workload against the model and the sequence of the job."""
    workload = plan.workload
    latent = args.multi_latent_attention
    grouped = args.group_query_attention and not latent
    kv_heads = args.num_query_groups if grouped else args.num_attention_heads
    key_dim, key_flag = args.kv_channels or args.hidden_size // args.num_attention_heads, "--kv-channels"
    if latent:
        key_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
        key_flag = "--qk-head-dim and --qk-pos-emb-head-dim with a sum of"
    layers, layers_flag = args.num_layers, "--num-layers"
    if pattern := hybrid_layers(args).replace("|", ""):  # Megatron counts its letters, whatever the flag says
        layers, layers_flag = len(pattern), "--hybrid-layer-pattern of length"
    width = tensor_parallel_flag(plan)
    sizes = (
        ("seq_length", workload.seq_length, "--seq-length", args.seq_length or args.encoder_seq_length),
        ("heads", workload.heads, "--num-attention-heads", args.num_attention_heads),
        ("kv_heads", workload.kv_heads, "--num-query-groups", kv_heads),
        ("head_dim", workload.head_dim, key_flag, key_dim),
        ("value_dim", workload.value_size, "--v-head-dim", args.v_head_dim if latent else key_dim),
        *_latent_sizes(args, workload),
        ("layers", workload.layers, layers_flag, layers),
        ("hidden_size", workload.hidden_size, "--hidden-size", args.hidden_size),
        ("experts", workload.experts, "--num-experts", args.num_experts),
        ("tensor_parallel", width, "--tensor-model-parallel-size", args.tensor_model_parallel_size),
    )
    different = [
        f"workload.{name} is {planned}, but the job has {flag} {value}"
        for name, planned, flag, value in sizes
        if planned is not None and planned != value
    ]
    if different:
        raise PlanError(f"{args.hexi_plan}: {'; '.join(different)}; use a plan made for this job")
    _check_states(args, plan)
    if not workload.causal:
        raise PlanError(
            f"{args.hexi_plan}: workload.causal is false, a GPT is causal; use a plan made for this job"
        )


def _check_states(args: Namespace, plan: Plan) -> None:
    """Check that the layers of the job that pass a state along the sequence find all of it in one group."""
    letters = layers_with_state(args)
    if not letters:
        return
    has_state = layers_by_state(args, "command line")
    divided = divided_domain(plan, has_state)
    if divided is not None:
        place, groups = divided
        raise PlanError(
            f"{args.hexi_plan}: {state_option(args)} has layers {letters}, whose state does not pass "
            f"between groups yet, and {place} has a domain of {groups} groups; put its members into one group"
        )
    widths = {args.tensor_model_parallel_size}
    if not plan.is_repeated:
        held = [(row.width, row.ministages or (row.layers or (0, 0),)) for row in domain_rows(plan)]
        widths = {width for width, ranges in held if any(any(has_state[slice(*own)]) for own in ranges)}
    for width in sorted(widths):
        asked = f"--tensor-model-parallel-size {width}"
        if not plan.is_repeated:
            asked = f"{args.hexi_plan}: {width}, the ranks of a unit,"
        for letter in letters:
            check_state_heads(args, "command line", letter, width, asked)


def _latent_sizes(args: Namespace, workload: Workload) -> list[tuple[str, int, str, int | None]]:
    """Return the plan's numbers of exchanged latent columns with the job's, for comparison.

    Returns:
        For each number: field name, the plan's value, Megatron's flag, and the job's value.
    """
    latent, path = workload.latent_exchange, args.hexi_plan
    if latent is None:
        return []
    mixed = hybrid_layers(args) or getattr(args, "experimental_attention_variant", None)
    refusals = (
        (
            not args.multi_latent_attention or bool(mixed),
            (
                "latent columns travel, which the job's attention does not have; leave it out, or train with "
                "--multi-latent-attention and without --hybrid-layer-pattern and "
                "--experimental-attention-variant"
            ),
        ),
        (is_assumed("<0.19"), "latent columns travel with megatron-core 0.19 only; leave it out"),
        (
            getattr(args, "mla_down_proj_fusion", False),
            "queries and latent columns come of two products; leave out --mla-down-proj-fusion",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise PlanError(f"{path}: workload.latent_exchange: {why}")
    place = "latent_exchange."
    return [
        (f"{place}kv_rank", latent.kv_rank, "--kv-lora-rank", args.kv_lora_rank),
        (f"{place}rotary_dim", latent.rotary_dim, "--qk-pos-emb-head-dim", args.qk_pos_emb_head_dim),
    ]


def check_recomputation(args: Namespace, plan: Plan) -> None:
    """Refuse modules that the job cannot compute again, of the job or of a stage of the plan."""
    stated = {stated_recompute(args): "--recompute-modules"}
    for number, replica in enumerate(plan.replicas):
        for place, stage in enumerate(replica.stages):
            where = f"{args.hexi_plan}: replicas[{number}].stages[{place}].recompute"
            stated.setdefault(stage.recompute, where)
    for recompute, where in stated.items():
        modules = Again.of(recompute).modules
        own = {argument_name(flag): value for flag, value in recompute_settings(recompute).items()}
        rules = find_refused(Namespace(**vars(args) | own), kind_of(plan), "--recompute-modules")
        faults = [f"{where}: {rule.reason}; {rule.remedy}" for rule in rules]
        if "mla_up_proj" in modules and plan.workload.latent_exchange is not None:
            again = "latent columns travel, and keys and values are made again anyway"
            faults.append(f"{where}: mla_up_proj: {again}; leave mla_up_proj out")
        raise_all(faults, PlanError)


def check_ranks(args: Namespace, plan: Plan) -> None:
    """Check the plan's number of ranks and parallel sizes against the job's."""
    path, size = args.hexi_plan, _context_parallel_size(plan)
    if args.context_parallel_size != size:
        reason = (
            f"a replica has {size} ranks"
            if has_equal_replicas(plan)
            else f"unequal replicas lie in one context-parallel group of all {size} ranks"
        )
        raise PlanError(
            f"{path}: {reason}, but the job has --context-parallel-size {args.context_parallel_size}; give "
            f"--context-parallel-size {size}, or leave it out"
        )
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    needed = plan.units * model
    if args.world_size != needed:
        sizes = " + ".join(str(len(replica.domain.members)) for replica in plan.replicas)
        raise PlanError(
            f"{path}: replicas of {sizes} ranks, tensor x pipeline parallel {model}, need {needed} ranks, "
            f"but the job has {args.world_size}; start {needed} ranks or use another plan"
        )


def replica_shares(args: Namespace, plan: Plan) -> tuple[Share, ...] | None:
    """Return each replica's share of the global batch; ``None`` if Megatron assigns equal ones."""
    if not _assigns_micro_batches(plan):
        return None
    path = args.hexi_plan
    try:
        shares = assign_micro_batches(plan, args.global_batch_size, args.micro_batch_size)
    except PlanError as problem:
        raise PlanError(
            f"{path}: {problem} (--global-batch-size {args.global_batch_size}, --micro-batch-size "
            f"{args.micro_batch_size})"
        ) from None
    return None if plan.is_repeated and has_equal_replicas(plan) else shares


def _assigns_micro_batches(plan: Plan) -> bool:
    """Whether the plan, rather than Megatron, assigns micro-batches to replicas."""
    stated = any(replica.micro_batches is not None for replica in plan.replicas)
    return stated or not plan.is_repeated or not has_equal_replicas(plan)


def _context_parallel_size(plan: Plan) -> int:
    """Return Megatron's context-parallel size under a plan; unequal replicas together count as one group."""
    return len(plan.replicas[0].domain.members) if has_equal_replicas(plan) else plan.units


def _set_decided_arguments(args: Namespace, given: set[str], plan: Plan) -> list[str]:
    """Set the arguments that a plan decides and the user did not give; return their flags."""
    changed = []
    if plan.is_repeated and "--context-parallel-size" not in given:
        args.context_parallel_size = _context_parallel_size(plan)
        changed.append(f"--context-parallel-size {args.context_parallel_size}")
    if not args.calculate_per_token_loss:
        # Ranks hold different numbers of tokens: only a mean over tokens is the mean of the batch.
        args.calculate_per_token_loss = True
        changed.append(PER_TOKEN)
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
    """Set the global batch size if the plan states it and the user does not; return the flag in a list."""
    if not _assigns_micro_batches(plan):
        return []
    if getattr(args, "step_batch_size_schedule", None) is not None:  # not in 0.17
        raise PlanError(
            f"{args.hexi_plan}: replicas take the same micro-batches of every global batch, but the job has "
            "--step-batch-size-schedule; leave it out, or make the replicas equal and leave micro_batches out"
        )
    if args.micro_batch_size is None or args.micro_batch_size < 1:
        raise PlanError(
            f"{args.hexi_plan}: replicas take whole micro-batches, but the job has --micro-batch-size "
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
