"""Set arguments by the `job` settings and experts of a plan, and refuse contradicting command lines."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatron_hexi.errors import PlanError, raise_all
from megatron_hexi.kinds.states import hybrid_layers
from megatron_hexi.options.kinds import items_of, row_of
from megatron_hexi.plan import Plan
from megatron_hexi.plan.check_ministages import interleaving_fault
from megatron_hexi.plan.flags import FLAGS
from megatron_hexi.plan.recompute import RECOMPUTE_FLAGS, recompute_settings
from megatron_hexi.plan.units import held_experts

#: Options of parallel sizes that each stage of a plan states for itself.
PARALLEL_SIZES: Final = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
#: Flags by which Megatron divides layers into stages, and experts over ranks.
STAGE_FLAGS: Final = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
#: Flags with a number of chunks of a stage's layers, or of layers of a chunk.
CHUNK_FLAGS: Final = (FLAGS["virtual_stages"], "--num-layers-per-virtual-pipeline-stage")
#: Megatron's other flags that cut a stage's layers into chunks: it takes only one of the three.
_OTHER_CHUNKS: Final = (CHUNK_FLAGS[1], "--pipeline-model-parallel-layout")
#: Fields of a plan's `job` that set several arguments, with their flags.
_TERMS: Final = {
    "precision": ("--bf16", "--fp16", "--fp8-format"),
    "overlap_gradients": (FLAGS["overlap_gradients"], "--overlap-param-gather"),
    "recompute": (*RECOMPUTE_FLAGS, "--recompute-activations"),
    # The planner's own number of stages: Megatron's other flags for stages need not fit it.
    "pipeline_parallel": (FLAGS["pipeline_parallel"], *STAGE_FLAGS),
    "virtual_stages": (FLAGS["virtual_stages"], *_OTHER_CHUNKS),
}

#: Fields of a plan's `job` that set a single argument of Megatron.
_SINGLE = (
    "micro_batch_size",
    "global_batch_size",
    "pipeline_parallel",
    "virtual_stages",
    "optimizer",
    "distributed_optimizer",
    "overlap_gradients",
    "sequence_parallel",
    "fp8_recipe",
)


@dataclass(frozen=True)
class _Setting:
    """One of Megatron's arguments with the value that the plan gives it.

    Args:
        allowed: further values that the command line may give.
    """

    place: str
    stated: Any
    flag: str
    value: Any
    allowed: tuple[Any, ...] = ()

    @property
    def argument(self) -> str:
        return row_of(self.flag).dest

    @property
    def spelt(self) -> str:
        """The argument and its value as command-line text."""
        words = self.value if isinstance(self.value, list) else [self.value]
        return self.flag if self.value is True else f"{self.flag} {' '.join(map(str, words))}"


def set_job_terms(args: Namespace, given: set[str], plan: Plan) -> list[str]:
    """Set Megatron's arguments by the plan's `job`, refuse contradictions; return what was set as text."""
    changed, faults = [], []
    for setting in _settings(plan):
        if setting.flag == FLAGS["virtual_stages"] and setting.value == 1 and hybrid_layers(args):
            continue  # Megatron takes no number of chunks beside a pattern, which has one
        value = getattr(args, setting.argument)
        if setting.flag in given:
            if value not in (setting.value, *setting.allowed):
                words = setting.flag if value is True else f"{setting.flag} {value}"
                faults.append(
                    f"{args.hexi_plan}: {setting.place} is {setting.stated}, the command line has {words}; "
                    f"leave {setting.flag} out, or make a plan for it"
                )
        elif value != setting.value:
            setattr(args, setting.argument, setting.value)
            if setting.value not in (False, None):
                changed.append(setting.spelt)
    rank, adapters = plan.job.lora_rank, getattr(args, "lora_rank", None)  # of Megatron Bridge's loop
    if rank not in (None, adapters):
        trained = "all weights" if adapters is None else f"adapters of rank {adapters}"
        faults.append(
            f"{args.hexi_plan}: job.lora_rank is {rank}, the job trains {trained}; make a plan for it with "
            f"hexi plan{'' if adapters is None else f' --lora-rank {adapters}'}"
        )
    raise_all(faults, PlanError)
    chunks = plan.job.virtual_stages
    if chunks is not None:
        place = f"{args.hexi_plan}: job.virtual_stages is {chunks}"
        if fault := interleaving_fault(chunks, args.pipeline_model_parallel_size, args.num_layers):
            raise PlanError(f"{place}: {fault}")
        if other := next((flag for flag in _OTHER_CHUNKS if flag in given), None):
            raise PlanError(f"{place}, the command line has {other}; leave one of them out")
    if any(stage.recompute is not None for stage in plan.stages):
        for flag in RECOMPUTE_FLAGS:
            if flag in given:
                raise PlanError(
                    f"{args.hexi_plan}: its stages say what they recompute, the command line has {flag}; "
                    f"leave {flag} out"
                )
    return changed


def _settings(plan: Plan) -> Iterator[_Setting]:
    job = plan.job
    if plan.is_repeated:
        width = plan.workload.tensor_parallel
        yield _Setting("tensor-parallel size", width, FLAGS["tensor_parallel"], width)
    for name in _SINGLE:
        stated = getattr(job, name)
        if stated is not None:
            yield _Setting(f"job.{name}", stated, FLAGS[name], stated)
    if job.precision is not None:
        is_fp8 = job.precision == "fp8"
        for precision in ("bf16", "fp16"):
            is_it = precision == ("bf16" if is_fp8 else job.precision)
            yield _Setting("job.precision", job.precision, f"--{precision}", is_it)
        fp8 = ("hybrid", ("e4m3",)) if is_fp8 else (None, ())
        yield _Setting("job.precision", job.precision, "--fp8-format", *fp8)
    if job.overlap_gradients and job.distributed_optimizer:
        yield _Setting("job.overlap_gradients", True, "--overlap-param-gather", True)
    if job.recompute is not None:
        for flag, value in recompute_settings(job.recompute).items():
            # Megatron's default is core attention, and without effect but for selective recomputation.
            allowed = (["core_attn"],) if flag == "--recompute-modules" and value is None else ()
            yield _Setting("job.recompute", job.recompute, flag, value, allowed)


def stage_terms(plan: Plan) -> frozenset[str]:
    """Return the fields of `job` that a plan does not record because its stages say them."""
    return frozenset() if plan.is_repeated else frozenset(("pipeline_parallel", "virtual_stages"))


def tensor_parallel_flag(plan: Plan) -> int:
    """Return --tensor-model-parallel-size under a plan: 1 if each unit of its stages has its own size."""
    return plan.workload.tensor_parallel if plan.is_repeated else 1


def replaced_flags(plan: Plan) -> frozenset[str]:
    """Return the flags that printed command lines leave out because the plan sets them."""
    terms = {term: _TERMS.get(term, (flag,)) for term, flag in FLAGS.items()} | _TERMS
    stated = {
        flag for term, flags in terms.items() if getattr(plan.job, term, None) is not None for flag in flags
    }
    stated |= {"--hexi-plan", "--seq-length", "--encoder-seq-length", "--context-parallel-size"}
    if plan.workload.tensor_parallel is not None:
        stated.add("--tensor-model-parallel-size")
    if not plan.is_repeated:
        stated |= {*PARALLEL_SIZES, *STAGE_FLAGS}
        if any(stage.recompute is not None for stage in plan.stages):
            stated |= set(_TERMS["recompute"])
    return frozenset(stated)


def vocabulary_step(plan: Plan, divisor: int) -> int:
    """Return the number of rows of which the padded vocabulary under a plan is a multiple.

    Args:
        divisor: ``--make-vocab-size-divisible-by``, of a tensor-parallel rank as Megatron counts.
    """
    if plan.workload.padded_vocabulary is not None:
        return plan.workload.padded_vocabulary
    return math.lcm(divisor * tensor_parallel_flag(plan), *(len(member.ranks) for member in plan.members))


def keep_vocabulary(args: Namespace, first: Plan, plan: Plan) -> None:
    """Set the job's arguments so that the vocabulary under a plan has as many rows as under the first.

    Args:
        args: Megatron's arguments, not yet checked; changed in place.
    """
    step = vocabulary_step(first, args.make_vocab_size_divisible_by)
    args.make_vocab_size_divisible_by = step // tensor_parallel_flag(plan)


def check_experts(args: Namespace, plan: Plan) -> None:
    """Check the experts of a job against a plan whose stages state their layers."""
    if not args.num_experts:
        return
    path = args.hexi_plan
    _check_losses(args, plan)
    shared, size = args.moe_shared_expert_intermediate_size, args.moe_ffn_hidden_size or args.ffn_hidden_size
    for member in plan.members:
        ranks, width = list(member.ranks), len(member.ranks)
        if width > 1 and not args.sequence_parallel:
            raise PlanError(
                f"{path}: ranks {ranks} are a unit, and with tensor parallelism Megatron trains experts "
                "under sequence parallelism only; add --sequence-parallel"
            )
        if shared and shared % width:
            raise PlanError(
                f"{path}: ranks {ranks} cut each shared expert in {width}, which does not divide "
                f"--moe-shared-expert-intermediate-size {shared}; give the unit another number of ranks"
            )
        parts = held_experts(member, args.num_experts)[0].parts
        if size is not None and size % parts:
            raise PlanError(
                f"{path}: ranks {ranks} cut each expert in {parts}, which does not divide "
                f"--moe-ffn-hidden-size {size}; give each rank a range of experts: [[0, 2], [2, 4]]"
            )
        if parts > 1 and args.add_bias_linear:
            raise PlanError(
                f"{path}: ranks {ranks} cut each expert in {parts}, and each would add its biases; give "
                "--disable-bias-linear, or each rank a range of experts: [[0, 2], [2, 4]]"
            )


def has_running_mean(args: Namespace) -> bool:
    """Return whether experts are balanced by a running mean over the micro-batches so far."""
    return "global_aux_loss" in items_of(args.moe_router_load_balancing_type)


def _check_losses(args: Namespace, plan: Plan) -> None:
    """Refuse a running mean over micro-batches if ranks run micro-batches in another order than one rank."""
    if not has_running_mean(args):
        return
    if len(plan.replicas) > 1:
        why = "counts the micro-batches so far, which other replicas run at other times"
    elif plan.has_ministages:
        why = "counts the micro-batches so far, which ministages run in another order"
    else:
        return
    raise PlanError(
        f"{args.hexi_plan}: --moe-router-load-balancing-type global_aux_loss {why}; use aux_loss or "
        "seq_aux_loss"
    )
