"""A planning request: a job with the terms that the user fixed, and its check against training's rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron_hexi.cluster import ANYTHING, PlannerRules
from megatron_hexi.errors import HexiError, NoFlagError, raise_all
from megatron_hexi.models import Job, model_flags
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.refusals import find_refused
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.expert_placement import IN_WHOLE_STAGES, ExpertRule
from megatron_hexi.shell.words import unplaced

#: Terms of a job that the planner chooses where they are not fixed.
CHOSEN: Final = ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "recompute")
#: How much work planning may take.
Effort = Literal["low", "normal", "high"]
_TIMINGS: Final[dict[Effort, int]] = {"low": 40, "normal": 400, "high": 4000}

#: Sizes of tensor-parallel units that are tried.
_WIDTHS = (1, 2, 4, 8)
#: More sequences a micro-batch are tried while all of them together have no more tokens than this: with more,
#: matrix products of a whole unit run at their best rate anyway.
_SHORT_TOKENS = 8192


@dataclass(frozen=True)
class Request:
    """A job to plan, with the terms that are fixed.

    Args:
        job: the job to plan; its terms in `CHOSEN` that are not fixed are reset to the defaults of `Job`.
        fixed: names in `CHOSEN` whose values in `job` the planner must keep.
        memory_margin: share of usable memory to keep free, from 0 to below 1; given up if no plan keeps it.
        rules: the features that plans may use; the cluster file decides those that are left open.
        context_parallel: tensor-parallel units that share each sequence, in every stage; ``None``: chosen.
        virtual_stages: chunks of each stage's layers (--num-virtual-stages-per-pipeline-rank); with more
            than one, stages cannot be unequal; ``None``: chosen, as are interleaved ministages.
        expert_parallel: ranks of an expert domain, in every stage; ``None``: chosen.
        experts: how experts are placed on the ranks of a stage, if the model has experts.
        fp8_everywhere: whether a job in fp8 refuses GPUs without it, and uses it where bf16 is faster, too.
        effort: how much work the changes of the best plans, and Megatron's layouts beside them, may take.

    Raises:
        HexiError: a name in `fixed` is not in `CHOSEN`, or a size is below 1 or not planned for this model.
    """

    job: Job
    fixed: frozenset[str] = frozenset()
    memory_margin: float = 0.0
    rules: PlannerRules = ANYTHING
    context_parallel: int | None = None
    virtual_stages: int | None = None
    expert_parallel: int | None = None
    experts: ExpertRule = IN_WHOLE_STAGES
    fp8_everywhere: bool = False
    effort: Effort = "normal"

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed.difference(CHOSEN))
        if unknown:
            raise HexiError(f"fixed: {unknown[0]} cannot be fixed; name some of {', '.join(CHOSEN)}")
        for name in ("context_parallel", "virtual_stages", "expert_parallel"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise HexiError(f"{spell_flag(name, size)}: give a number above 0, or leave it out")
        if self.expert_parallel is not None and self.job.model.experts is None:
            if self.expert_parallel > 1:
                size_of = spell_flag("expert_parallel", self.expert_parallel)
                raise HexiError(f"{size_of}: {self.job.model.name} has no experts; leave the option out")
            object.__setattr__(self, "expert_parallel", None)
        if self.virtual_stages is not None and self.virtual_stages > 1:
            self._refuse_beside_chunks(self.virtual_stages)
            object.__setattr__(self, "rules", replace(self.rules, unequal_stages=False))
        if self.job.documents is not None:  # with which a micro-batch is one sequence
            object.__setattr__(self, "fixed", self.fixed | {"micro_batch_size"})
        free = {name: getattr(Job, name) for name in CHOSEN if name not in self.fixed}
        object.__setattr__(self, "job", replace(self.job, **free))

    def _refuse_beside_chunks(self, chunks: int) -> None:
        """Refuse chunks with experts, layer patterns, multi-token prediction and unequal stages."""
        spelt = spell_flag("virtual_stages", chunks)
        if self.job.model.experts is not None:
            raise HexiError(
                f"{spelt}: stages of models with experts have layers of their own, and are not cut into "
                "chunks; leave the option out"
            )
        if self.job.model.uncut:
            raise HexiError(f"{spelt}: {self.job.model.uncut}; leave the option out")
        if self.rules.unequal_stages:
            allowed = spell_flag("unequal_stages", True)
            raise HexiError(f"{spelt} and {allowed}: only equal stages have chunks; leave one of them out")

    @property
    def most_timings(self) -> int:
        """The most changes of the plans of one search that are timed, and the most of Megatron's layouts."""
        return _TIMINGS[self.effort]

    @property
    def may_interleave(self) -> bool:
        """Whether stages that differ may run their ministages in interleaved 1F1B."""
        keeps_layers = "recompute" in self.fixed and bool(self.job.again.first)
        if self.virtual_stages is not None or keeps_layers:  # which ministages cannot have
            return False
        return self.rules.allow("ministages") and self.rules.allow("unequal_stages")

    def chunk_counts(self, job: Job) -> list[int]:
        """Return the numbers of chunks a stage to try: divisors of its layers, or 1 if it cannot be cut."""
        if job.pipeline_parallel == 1 or not job.has_equal_stages or job.model.uncut:
            counts = [1]
        else:
            counts = [count for count in range(1, job.stage_layers + 1) if job.stage_layers % count == 0]
        return [count for count in counts if self.virtual_stages in (None, count)]

    def widths(self, most: int) -> list[int]:
        """Return the tensor-parallel sizes to try: up to `most`, by which the model can be divided."""
        if "tensor_parallel" in self.fixed:
            return [self.job.tensor_parallel]
        experts = self.expert_parallel or math.lcm(*_WIDTHS)  # an expert domain consists of whole units
        return [
            width for width in _WIDTHS if width <= most and experts % width == 0 and self._can_be_cut(width)
        ]

    def micro_batch_sizes(self) -> list[int]:
        """Return the micro-batch sizes to try: one, and more where sequences are short."""
        if "micro_batch_size" in self.fixed:
            return [self.job.micro_batch_size]
        sizes, batch = [1], self.job.global_batch_size
        while batch % (2 * sizes[-1]) == 0 and 2 * sizes[-1] * self.job.seq_length <= _SHORT_TOKENS:
            sizes.append(2 * sizes[-1])
        return sizes

    def with_width(self, width: int) -> Job:
        """Return the job with this tensor-parallel size.

        Raises:
            HexiError: the model cannot be cut so.
        """
        return replace(self.job, tensor_parallel=width)

    def _can_be_cut(self, width: int) -> bool:
        try:
            _ = self.with_width(width).encoder  # refuses heads of the encoder that ranks cannot divide
        except HexiError:
            return False
        return True


def refuse_untrained(request: Request) -> None:
    """Refuse a request for layers that training refuses in every plan.

    Raises:
        HexiError: training refuses the layers, or the tensor-parallel size; with the option and the reason.
    """
    model = request.job.model
    try:
        flags = model_flags(model, request.job.seq_length)
    except NoFlagError:
        return  # no job can be started, and its times may be asked for
    if any(experts.score_bias for experts in model.routed):  # which Megatron has of sigmoids alone
        flags += ["--moe-router-score-function", "sigmoid"]
    words = unplaced(flags)
    options = find_refused(parse_words(words, model.name).args, "any")
    raise_all([f"model {model.name}: {option.message}" for option in options])
