"""Options that commands share: the job, spelled once and read by each command that needs one.

A command takes a bundle of them as one parameter, and `with_bundles` (bundles.py) shows typer its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_hexi.cli.bundles import PlanFeatures
from megatron_hexi.cli.output import say
from megatron_hexi.cli.sequence_contents import SequenceContents
from megatron_hexi.cluster import MEMORY_MARGIN, PlannerRules
from megatron_hexi.errors import HexiError
from megatron_hexi.models import (
    FP8_RECIPES,
    PRECISIONS,
    Job,
    read_model,
    read_terms,
    reading_notes,
    refuse_imbalance,
)
from megatron_hexi.plan.flags import flag_name, spell_flag
from megatron_hexi.plan.recompute import MODULES, RECOMPUTES
from megatron_hexi.whole_number import whole_number

if TYPE_CHECKING:  # brings the solver, which takes a second
    from megatron_hexi.planner import Request

#: Far above any job, and small enough that nothing is built for too many.
LIMITS = {
    "seq_length": 2**40,  # what a plan can count
    "heads": 2**16,
    "micro_batch_size": 2**20,
    "global_batch_size": 2**20,
    "tensor_parallel": 2**16,
    "pipeline_parallel": 2**16,
    "virtual_stages": 10_000,
}

_FACTORS = {"K": 2**10, "M": 2**20}

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan.")]
ClusterPath = Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="The cluster file.")]
ClusterOption = Annotated[
    Path, typer.Option("--cluster", metavar="CLUSTER.yaml", help="The cluster that the plan is for.")
]

#: As in `megatron_hexi.models.presets`, which takes too long to read for --help.
PRESETS = (
    *("gpt-3b", "gpt-7b", "gpt-13b", "gpt-70b"),
    *("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b"),
    *("mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"),
    *("gpt-oss-20b", "gpt-oss-120b", "glm-4.5", "gemma-3-27b", "llama-4-scout", "llama-4-maverick"),
    *("qwen3-next-80b-a3b", "nemotron-h-8b", "nemotron-h-56b"),
    *("qwen2.5-vl-7b", "qwen2.5-vl-72b", "qwen3-vl-30b-a3b"),
)
_MODEL = (
    f"A preset ({', '.join(PRESETS)}), a recipe (hexi recipe list), a Hugging Face config.json, a file of "
    "Megatron's arguments, a launch script (Megatron's, slime's, ms-swift's or verl's), or "
    "Megatron Bridge's run_config.yaml"
)
MODEL_OF_PLAN = f"{_MODEL}; the one that the plan names if not given."
MODEL_OF_REPORT = f"{_MODEL}; used with --cluster, by default the one that the plan names."
_JOB = "The job"
#: Fields of bundles that are no terms of a `Job`.
_NOT_TERMS = (
    "model",
    *(field.name for field in dataclasses.fields(SequenceContents)),
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "memory_margin",
    *(field.name for field in dataclasses.fields(PlanFeatures)),
)


def whole(text: str | int) -> int:
    """Parse a whole number: ``131072``, or in powers of 1024 ``128K`` or ``1M``.

    Raises:
        BadParameter: it spells none; typer puts the option's name before.
    """
    if isinstance(text, int):
        return text
    factor = _FACTORS.get(text[-1:].upper(), 1)
    number = whole_number(text[:-1] if factor > 1 else text)
    if number is None:
        raise typer.BadParameter(f"{text[:40]!r} is not a whole number; write one, as 131072 or 128K")
    return number * factor


def check_limits(numbers: Mapping[str, int | None]) -> None:
    """Refuse numbers above their `LIMITS`, by field name."""
    for field, value in numbers.items():
        if value is not None and value > LIMITS[field]:
            raise HexiError(f"{spell_flag(field, value)}: is too large; the most is {LIMITS[field]}")


def count_option(field: str, text: str, panel: str | None = _JOB) -> Any:
    """Return the command-line option for a whole number, named like Megatron's argument `field`."""
    return typer.Option(flag_name(field), help=text, metavar="N", rich_help_panel=panel, parser=whole)


def job_option(field: str, text: str, *, metavar: str | None = None) -> Any:
    """Return the option for a field of `Job`, named as in Megatron; without a metavar it is two flags."""
    name = flag_name(field) if metavar else "/".join(spell_flag(field, value) for value in (True, False))
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel=_JOB)


#: What a file of arguments leaves at Megatron's defaults, by field of `Job`, with what it costs.
_LEFT = {
    "precision": "fp32",
    "distributed_optimizer": "no --use-distributed-optimizer, which saves memory with several replicas",
    "overlap_gradients": "no --overlap-grad-reduce with --overlap-param-gather, which saves time there",
    "sequence_parallel": "no --sequence-parallel, which saves memory with tensor parallelism",
}


_CHOSEN = "default: the planner's choice"


def _planned(default: object) -> str:
    return f"default: the plan's, else {default}"


#: What holds where an option of `Training` is not given: for a job to plan for, and for the job of a plan.
_OTHERWISE = {
    "micro_batch_size": (_CHOSEN, _planned(Job.micro_batch_size)),
    "global_batch_size": (f"default: {Job.global_batch_size}", _planned(Job.global_batch_size)),
    "pipeline_parallel": (_CHOSEN, f"{_planned(Job.pipeline_parallel)} (for plans without stages)"),
    "virtual_stages": (_CHOSEN, _planned(Job.virtual_stages)),
    "recompute": (f"{_CHOSEN} for each stage", _planned(Job.recompute)),
    "precision": (f"default: {Job.precision}", _planned(Job.precision)),
    "fp8_recipe": (f"default: {Job.fp8_recipe}", _planned(Job.fp8_recipe)),
    "lora_rank": ("default: all weights are trained", "default: the plan's, else all weights are trained"),
    "expert_imbalance": (f"default: {Job.expert_imbalance}", _planned(Job.expert_imbalance)),
}
OF_NEW_JOB = {field: new for field, (new, _) in _OTHERWISE.items()}
OF_PLANNED_JOB = {field: planned for field, (_, planned) in _OTHERWISE.items()}


@dataclass(frozen=True, kw_only=True)
class Training(SequenceContents):
    """Options that say how Megatron trains, named like `Job`'s fields; ``None`` where not given."""

    micro_batch_size: Annotated[int | None, count_option("micro_batch_size", "Sequences per micro-batch")] = (
        None
    )
    global_batch_size: Annotated[int | None, count_option("global_batch_size", "Sequences per iteration")] = (
        None
    )
    pipeline_parallel: Annotated[
        int | None, count_option("pipeline_parallel", "Number of pipeline stages")
    ] = None
    virtual_stages: Annotated[
        int | None, count_option("virtual_stages", "Chunks per stage, in interleaved 1F1B")
    ] = None
    recompute: Annotated[
        str | None,
        job_option(
            "recompute",
            f"What to recompute: {', '.join(RECOMPUTES)}, or some of {', '.join(MODULES)}, with commas",
            metavar="WHAT",
        ),
    ] = None
    precision: Annotated[
        str | None,
        job_option("precision", f"Type of weights and activations: {', '.join(PRECISIONS)}", metavar="TYPE"),
    ] = None
    fp8_recipe: Annotated[
        str | None, job_option("fp8_recipe", f"Scales of fp8: {', '.join(FP8_RECIPES)}", metavar="RECIPE")
    ] = None
    kernel: Annotated[
        str | None,
        job_option(
            "kernel",
            "Attention kernel, or one for each kind of GPU: H100=cudnn,A100=flash-attn-2; default: the "
            "cluster file's, else the fastest of hexi catalog.",
            metavar="NAME",
        ),
    ] = None
    distributed_optimizer: Annotated[
        bool | None,
        job_option("distributed_optimizer", "Shard the optimizer state over the replicas; default: on."),
    ] = None
    overlap_gradients: Annotated[
        bool | None,
        job_option(
            "overlap_gradients",
            "Overlap gradient sums, and --overlap-param-gather, with computation; default: on.",
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        job_option(
            "sequence_parallel", "Divide norms and residuals over tensor-parallel ranks; default: on."
        ),
    ] = None
    expert_imbalance: Annotated[
        float | None,
        job_option(
            "expert_imbalance",
            "Standard deviation of the experts' tokens over their mean, as hexi report measures it",
            metavar="RATIO",
        ),
    ] = None

    lora_rank: Annotated[
        int | None,
        count_option("lora_rank", "Rank of adapters (LoRA, DoRA) on frozen weights, which alone are trained"),
    ] = None

    def _stated(self, arguments: str | None) -> dict[str, Any]:
        """Return the fields of `Job` that are given on the command line, or else in a file of arguments."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in _NOT_TERMS]
        stated = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        terms = None if arguments is None else read_terms(arguments)
        if terms is not None:
            from_file = {name: terms.fields[name] for name in names if name in terms.fields.keys() - stated}
            said = {name: value for name, value in from_file.items() if name not in terms.defaults}
            if said:
                say(f"note: {arguments} says {' '.join(starmap(spell_flag, said.items()))}")
            left = [_LEFT[name] for name in from_file if name in terms.defaults]
            if left:
                say(f"note: {arguments} leaves Megatron's defaults: {', '.join(left)}")
            if terms.free:
                say(f"note: {arguments}: plans do not depend on {', '.join(terms.free)}")
            for note in reading_notes(str(arguments)):
                say(f"note: {arguments}: {note}")
            stated |= from_file
            if terms.packed and self.document_lengths is None:
                say(
                    f"note: {arguments} packs documents, and each sequence counts as one of them: attention "
                    "takes less time; give their tokens: --document-lengths FILE"
                )
        if "fp8_recipe" in stated and stated.get("precision", "fp8") != "fp8":
            recipe = spell_flag("fp8_recipe", stated["fp8_recipe"])
            raise HexiError(f"{recipe}: applies to jobs in fp8 only; give --precision fp8 too")
        check_limits({name: stated[name] for name in LIMITS if name in stated})
        return stated


def unfused_terms(model: str) -> dict[str, Any]:
    """Return `Job.unfused`, by its name, where a file of arguments states it: no plan or option does."""
    terms = read_terms(model)
    return {name: value for name, value in (terms.fields if terms else {}).items() if name == "unfused"}


@dataclass(frozen=True, kw_only=True)
class NewJob(PlanFeatures, Training):
    """Options of a job to plan for; the planner chooses those of the layout that are not given."""

    otherwise = OF_NEW_JOB

    model: Annotated[
        str,
        job_option("model", f"{_MODEL}; options override the job terms in it.", metavar="NAME|PATH"),
    ] = ""
    seq_length: Annotated[
        int | None, count_option("seq_length", "Tokens per sequence, such as 131072 or 128K.")
    ] = None
    tensor_parallel: Annotated[
        int | None,
        count_option("tensor_parallel", f"Tensor-parallel size; {_CHOSEN} for each stage."),
    ] = None
    memory_margin: Annotated[
        float,
        typer.Option(
            help="Per cent of usable memory to keep free; less, with a warning, if nothing else fits.",
            metavar="PERCENT",
            min=0,
            max=90,
            rich_help_panel=_JOB,
        ),
    ] = 100 * MEMORY_MARGIN
    context_parallel: Annotated[
        int | None,
        count_option("context_parallel", f"Tensor-parallel units that share a sequence; {_CHOSEN}."),
    ] = None
    expert_parallel: Annotated[
        int | None,
        count_option(
            "expert_parallel",
            f"Expert-parallel size: ranks that together hold all experts of a layer; {_CHOSEN}.",
        ),
    ] = None
    data_parallel: Annotated[
        str,
        job_option(
            "data_parallel",
            "Number of replicas, which may differ in size; auto: the planner's choice.",
            metavar="N|auto",
        ),
    ] = "auto"

    def named(self) -> NewJob:
        """Return the job, which must name a model."""
        if not self.model:
            raise HexiError(
                "--model is missing; give NAME|PATH, or to hexi plan -- and your script's command"
            )
        return self

    def request(self, batch_shares: bool = False) -> Request:
        """Return the request to the planner.

        Args:
            batch_shares: whether each batch's documents are dealt out anew.
        """
        from megatron_hexi.planner import CHOSEN, Request, check_depth

        model, stated = read_model(self.model), self._stated(self.model)
        refuse_imbalance(self.expert_imbalance, model)
        if "seq_length" not in stated:
            raise HexiError(f"--seq-length is missing, and {self.model} does not say it; add --seq-length N")
        terms, replicas = read_terms(self.model), self._replicas
        needed = terms.fields.get("data_parallel") if terms else None
        if needed is not None and replicas not in (None, needed):
            raise HexiError(
                f"{spell_flag('data_parallel', replicas)}: --moe-router-load-balancing-type global_aux_loss "
                f"of {self.model} trains with one replica only; give 1, or another balancing loss"
            )
        if (replicas or needed) is not None:
            stated["data_parallel"] = replicas or needed
        fixed = frozenset(stated.keys() & set(CHOSEN))
        if "pipeline_parallel" in fixed:
            check_depth(stated["pipeline_parallel"], model.layers)
        chunks = stated.pop("virtual_stages", None)
        job = Job(model=model, **stated, **unfused_terms(self.model))
        job = self.with_contents(job, dealt=batch_shares, divided=self.divide_images)
        margin = self.memory_margin / 100
        if terms and terms.context_parallel is not None and self.context_parallel is None:
            flag = spell_flag("context_parallel", terms.context_parallel)
            say(
                f"note: {self.model}: {flag} is ignored, the planner chooses it; give it on the command "
                "line to keep it"
            )
        if terms and terms.chunks and chunks is None:
            flag = flag_name("virtual_stages")
            say(
                f"note: {self.model}: {terms.chunks} is ignored, the planner chooses; give {flag} on the "
                "command line to keep it"
            )
        experts = self.expert_parallel
        if terms and terms.expert_parallel is not None and experts is None:
            experts = terms.expert_parallel
            say(f"note: {self.model} says {spell_flag('expert_parallel', experts)}")
        request = Request(job, fixed, margin, self._rules_of_file(), self.context_parallel, chunks, experts)
        return replace(request, fp8_everywhere=self.fp8_everywhere, effort=self.effort)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on terms that were not given although most figures depend on them, each with what to type."""
        terms = read_terms(self.model)
        if self.global_batch_size is not None or (terms and "global_batch_size" in terms.fields):
            return ()
        flag = flag_name("global_batch_size")
        note = (
            f"{flag} is not given: planned for {Job.global_batch_size} sequences per iteration, on which "
            f"most figures depend; add the batch that you train with, such as {flag} 64"
        )
        return (note,)

    def _rules_of_file(self) -> PlannerRules:
        """Return what plans may use: the command line's rules, less what a file of arguments rules out."""
        terms = read_terms(self.model)
        rules = self.rules
        for flag, features in (terms.restricting if terms else {}).items():
            for feature in features:
                allow = spell_flag(feature, True)
                if getattr(rules, feature):
                    raise HexiError(f"{allow}: does not work with {flag} of {self.model}; leave {allow} out")
                rules = replace(rules, **{feature: False})
            names = " and ".join(spell_flag(feature, False) for feature in features)
            say(f"note: {self.model}: {flag} trains with {names} only, and is planned so")
        return rules

    @property
    def _replicas(self) -> int | None:
        """Number of data-parallel replicas; ``None`` lets the planner choose it."""
        text = self.data_parallel
        if text == "auto":
            return None
        replicas = whole_number(text)
        if replicas is None or replicas < 1:
            raise HexiError(f"--data-parallel-size {text[:40]}: give a number above 0, or auto")
        return replicas
