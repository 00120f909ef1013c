"""The job: a model, a sequence length, a batch, and Megatron's options for training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NoReturn, get_args

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.part import Columns
from megatron_hexi.models.documents import DocumentClass, Documents
from megatron_hexi.models.model import Model
from megatron_hexi.models.planned_kinds import refuse_unpacked, refuse_unplanned
from megatron_hexi.models.vision import Images
from megatron_hexi.options.job_terms import stage_terms
from megatron_hexi.plan import JobTerms, Plan, Workload
from megatron_hexi.plan.check_ministages import interleaving_fault
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.recompute import MODULES, RECOMPUTES, Again, Recompute
from megatron_hexi.plan.terms import Fp8Recipe, Precision, join_kernels, split_kernels

#: Operations of which Megatron knows one kernel and several.
Fusible = Literal["norms", "rotary", "activation", "permutation", "experts", "loss", "gradients", "optimizer"]
FUSIBLES: tuple[Fusible, ...] = get_args(Fusible)
#: Precisions in which the runtime trains.
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: Recipes of fp8 in which the runtime trains.
FP8_RECIPES: tuple[Fp8Recipe, ...] = get_args(Fp8Recipe)
#: Default variation of experts' loads: an estimate for a trained router with a balancing loss.
EXPERT_IMBALANCE: Final = 0.2
#: If one of a thousand experts gets all rows, the variation is the root of 999.
_MOST_IMBALANCE = 32

_COUNTS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "data_parallel",
)


@dataclass(frozen=True)
class Job:
    """A model, its batch, and how it is trained.

    Args:
        model: the model's shapes.
        seq_length: tokens of one sequence (S).
        micro_batch_size: sequences of a micro-batch (B).
        global_batch_size: sequences of one iteration, over all replicas.
        tensor_parallel: GPUs that share each weight: --tensor-model-parallel-size.
        pipeline_parallel: number of pipeline stages: --pipeline-model-parallel-size.
        virtual_stages: number of chunks of a stage's layers, which Megatron's interleaved schedule runs in
            turn: --num-virtual-stages-per-pipeline-rank.
        data_parallel: number of replicas.
        recompute: work that the backward pass computes again: --recompute-granularity. ``selective`` is core
            attention; ``full`` is every layer, with its all-to-alls and its exchange; a number is ``full``
            for that many layers; a tuple is --recompute-modules in every layer.
        precision: precision of weights and activations; ``fp8``: products of the layers' matrices in fp8 on
            GPUs that have it, all else in bf16, as with Megatron's --fp8-format.
        fp8_recipe: how values are scaled before they are cast to fp8: --fp8-recipe; only with precision fp8.
        distributed_optimizer: whether optimizer state is divided over all replicas:
            --use-distributed-optimizer. If the plan gives stages their layers, it always is.
        overlap_gradients: whether gradients and weights travel behind computation: --overlap-grad-reduce and
            --overlap-param-gather.
        sequence_parallel: --sequence-parallel; it has no effect unless `tensor_parallel` is above 1.
        kernel: name of the attention kernel, or one for each model of GPU (`megatron_hexi.plan.terms`);
            ``None``: each GPU's default.
        latent_exchange: whether latent columns travel between ranks in place of keys and values, as in plans
            with `workload.latent_exchange`; only for models with latent attention.
        expert_imbalance: variation of the loads of experts: standard deviation over mean of the rows of an
            expert, as ``hexi report`` measures it.
        documents: documents of which sequences are packed, each of which attends within itself; ``None``:
            each sequence is one document.
        unfused: operations that are several kernels each in place of one: norms of torch, rotary embedding
            (--no-rope-fusion), activation with its gate (--no-bias-swiglu-fusion), permutation of the rows of
            experts (without --moe-permute-fusion), products of experts (without --moe-grouped-gemm; only
            the grouped have activations that can be computed again), loss (without
            --cross-entropy-loss-fusion), addition of gradients (--no-gradient-accumulation-fusion), torch's
            optimizer. Norms and optimizer are of Transformer Engine, or of apex where that is there.
        lora_rank: rank of the adapters (LoRA, DoRA) beside each matrix of the layers, which alone are
            trained; 0: all weights are.
        state_bytes: bytes of optimizer state of a weight, with the optimizer's own copy of it, where
            --use-precision-aware-optimizer gives them types; ``None``: as the precision has.
        gradient_bytes: bytes of the sum of a weight's gradients (2 by --grad-reduce-in-bf16); ``None``: as
            the precision has.
        images: images of each sequence, which the first stage encodes; ``None``: the encoder is left out.

    Raises:
        HexiError: sizes that Megatron cannot divide, values that it does not know, or a model with layers
            that are not modelled (`refuse_unplanned`).
    """

    model: Model
    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int = 8
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    data_parallel: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    distributed_optimizer: bool = True
    overlap_gradients: bool = True
    sequence_parallel: bool = True
    kernel: str | None = None
    latent_exchange: bool = False
    expert_imbalance: float = EXPERT_IMBALANCE
    documents: Documents | None = None
    unfused: tuple[Fusible, ...] = ("permutation", "experts", "loss")
    lora_rank: int = 0
    fp8_recipe: Fp8Recipe = "delayed"
    state_bytes: int | None = None
    gradient_bytes: int | None = None
    images: Images | None = None

    def __post_init__(self) -> None:
        refuse_unplanned(self.model)
        object.__setattr__(self, "unfused", tuple(self.unfused))  # a list where it was JSON
        if not 0 <= self.expert_imbalance <= _MOST_IMBALANCE:
            _refuse("expert_imbalance", self.expert_imbalance, f"give a number from 0 to {_MOST_IMBALANCE}")
        for field in _COUNTS:
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                _refuse(field, value, "write a whole number above 0")
        if type(self.lora_rank) is not int or self.lora_rank < 0:
            _refuse("lora_rank", self.lora_rank, "write a whole number, or 0 to train all weights")
        self._check_recomputation()
        for operation in self.unfused:
            if operation not in FUSIBLES:
                _refuse("unfused", operation, f"use {', '.join(FUSIBLES)}")
        if self.precision not in PRECISIONS:
            _refuse("precision", self.precision, f"use {', '.join(PRECISIONS)}")
        if self.fp8_recipe not in FP8_RECIPES:
            _refuse("fp8_recipe", self.fp8_recipe, f"use {', '.join(FP8_RECIPES)}")
        if self.kernel is not None:
            split_kernels(self.kernel)
        if self.latent_exchange not in self.model.attention.exchanges:
            _refuse("latent_exchange", True, f"leave it out: {self.model.name} has no latent attention")
        self._check_division()
        if self.documents is not None:
            refuse_unpacked(self.model, self.micro_batch_size, dealt=self.documents.dealt)
        if self.images is not None:
            self._check_images(self.images)

    def _check_images(self, images: Images) -> None:
        """Refuse images that the model does not encode, or that have more tokens than a sequence."""
        spelt, vision = spell_flag("images_per_sequence", images.per_sequence), self.model.vision
        if vision is None:
            raise HexiError(f"{spelt}: {self.model.name} has no encoder of images; leave it out")
        if self.lora_rank and images.frozen:
            lora = spell_flag("lora_rank", self.lora_rank)
            _refuse(images.frozen[0], True, f"leave it out: {lora} freezes all but adapters")
        if self.image_tokens > self.seq_length:
            raise HexiError(
                f"{spelt} {spell_flag('patches', images.patches)}: are {self.image_tokens:,.0f} tokens, more "
                f"than a sequence of {self.seq_length:,}; give fewer, or longer sequences"
            )

    def _check_recomputation(self) -> None:
        """Check what is recomputed; a list, where it was JSON, and text with commas become a tuple."""
        given: Any = self.recompute
        if given in RECOMPUTES or (type(given) is int and given > 0):
            return
        modules = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        known = isinstance(modules, list | tuple) and modules and set(modules) <= set(MODULES)
        if not known:
            some = ", ".join(MODULES)
            _refuse("recompute", given, f"use {', '.join(RECOMPUTES)}, or some of {some}, with commas")
        if "mla_up_proj" in modules and True not in self.model.attention.exchanges:
            _refuse("recompute", "mla_up_proj", f"leave it out: {self.model.name} has no latent attention")
        object.__setattr__(self, "recompute", tuple(modules))

    def _check_division(self) -> None:
        model, tp, pp = self.model, self.tensor_parallel, self.pipeline_parallel
        sizes = [("heads", model.heads), ("MLP width", model.ffn_hidden_size)]
        for state in model.scans:  # Megatron's MambaMixer and GatedDeltaNet cut both
            sizes += [("heads with a state", state.heads), ("groups of these heads", state.groups)]
        for what, size in sizes:
            if size % tp:
                remedy = f"give a number that divides the {what} of {model.name}, {size}"
                _refuse("tensor_parallel", tp, remedy)
        if model.kv_heads % tp and tp % model.kv_heads:
            _refuse("tensor_parallel", tp, f"give a divisor or multiple of the {model.kv_heads} KV heads")
        if pp > model.layers:
            _refuse(
                "pipeline_parallel", pp, f"the model has {model.layers} layers; give {model.layers} or fewer"
            )
        fault = interleaving_fault(self.virtual_stages, pp, model.layers)
        if fault is not None:
            raise HexiError(f"{spell_flag('virtual_stages', self.virtual_stages)}: {fault}")
        if self.global_batch_size % self.micro_batch_size:
            _refuse(
                "global_batch_size",
                self.global_batch_size,
                f"give a multiple of {spell_flag('micro_batch_size', self.micro_batch_size)}",
            )

    @cached_property
    def kinds(self) -> tuple[Job, ...]:
        """For each kind of layer of the model, the job with a model of only such layers, in one stage.

        These models have no multi-token prediction, whose layers are of the kind of the model's last layer.
        """
        if self.model.kinds[0] is self.model and not self.model.stays_in_bf16:
            return (self,)
        return tuple(
            replace(
                self,
                model=kind,
                pipeline_parallel=1,
                virtual_stages=1,
                precision="bf16" if self.precision == "fp8" and kind.stays_in_bf16 else self.precision,
            )
            for kind in self.model.kinds
        )

    @cached_property
    def encoder(self) -> Job | None:
        """This job with the encoder's layers for a model and an image's patches for a sequence.

        It is in 16 bits where layers are in fp8, without sequence parallelism, and has adapters where these
        join it. ``None``: there are no images. Ranks that divide it have to divide its heads (HexiError).
        """
        model, vision = self.model.encoder, self.model.vision
        if self.images is None or model is None or vision is None:
            return None
        return replace(
            self,
            model=model,
            seq_length=self.images.patches,
            micro_batch_size=1,
            global_batch_size=1,
            tensor_parallel=self.tensor_parallel if vision.in_megatron else 1,
            sequence_parallel=False,
            pipeline_parallel=1,
            virtual_stages=1,
            recompute="none",
            precision="bf16" if self.precision == "fp8" else self.precision,
            lora_rank=self.lora_rank * self.trained_vision[0],
            latent_exchange=False,
            documents=None,
            images=None,
        )

    @property
    def image_tokens(self) -> float:
        """Number of tokens of a sequence that are images."""
        if self.images is None or self.model.vision is None:
            return 0.0
        return self.images.per_sequence * self.model.vision.tokens(self.images.patches)

    @property
    def first_layers(self) -> int:
        """Least number of layers of a first stage: 1, or with images those that add further features."""
        return 1 if self.images is None or self.model.vision is None else self.model.vision.deepstack

    @cached_property
    def trained_vision(self) -> tuple[bool, bool]:
        """Whether the encoder of images is trained, itself or by adapters, and whether its projectors are."""
        images, vision = self.images, self.model.vision
        if images is None or vision is None or (self.lora_rank and not vision.in_megatron):
            return False, False
        return not images.freeze_vision_model, not images.freeze_vision_projection

    @cached_property
    def in_bf16(self) -> Job:
        """This job as GPUs without fp8 train it."""
        return replace(self, precision="bf16")

    @cached_property
    def trained_share(self) -> float:
        """Part of all weights that is trained, also of an encoder with adapters: 1, or less with adapters."""
        model, params = self.model, self.model.total_params
        adapted = sum(n * kind.matrix_columns for kind, n in zip(model.kinds, model.layers_run, strict=True))
        if self.images is not None and model.encoder_columns:
            adapted, params = adapted + model.encoder_columns, params + sum(model.encoder_params())
        return self.lora_rank * adapted / params if self.lora_rank else 1.0

    @property
    def packed(self) -> tuple[DocumentClass, ...]:
        """Documents of a sequence by length, in the mean."""
        if self.documents is None:
            return (DocumentClass(1.0, float(self.seq_length)),)
        return self.documents.classes(self.seq_length)

    @property
    def keys_seen(self) -> float:
        """Mean number of keys that a query of the layers, which are of one kind, sees."""
        return sum(share * self.model.span.keys_seen(length) for share, length in self.packed)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.precision == "fp32" else 2

    @property
    def stage_layers(self) -> int:
        """Number of layers of a pipeline stage, if all stages have equally many (`has_equal_stages`)."""
        return self.model.layers // self.pipeline_parallel

    @property
    def has_equal_stages(self) -> bool:
        """Whether all pipeline stages can have equally many layers, as Megatron divides them by default."""
        return self.model.layers % self.pipeline_parallel == 0

    @property
    def again(self) -> Again:
        """Modules and layers that the backward pass computes again."""
        return Again.of(self.recompute)

    @property
    def row_parts(self) -> int:
        """Number of tensor-parallel ranks that share the rows of norms and residuals."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @cached_property
    def columns(self) -> Columns:
        """Columns of a row in all parts of a layer on one rank; layers are of one kind."""
        how = self.model, self.tensor_parallel, self.row_parts, self.latent_exchange
        return Columns.sum(part.row_columns(*how) for part in self.model.parts)

    @property
    def exchanged_columns(self) -> int:
        """Number of columns of a KV head that travel between ranks: key and value, or all latent columns."""
        return sum(self.workload().exchanged_sizes)

    def workload(self) -> Workload:
        """Return the workload of plans for this job."""
        return self._workload

    @cached_property
    def _workload(self) -> Workload:
        model = self.model
        return Workload(
            seq_length=self.seq_length,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            layers=model.layers,
            hidden_size=model.hidden_size,
            tensor_parallel=self.tensor_parallel,
            **model.attention.planned_sizes(self.latent_exchange),
        )


def job_terms(stated: Mapping[str, Any], plan: Plan) -> JobTerms:
    """Return the terms of a job that a plan records.

    Args:
        stated: values of the fields of `Job` that the user stated, by name; all other fields stay open.
    """
    fields = JobTerms.__dataclass_fields__.keys() - stage_terms(plan)
    if plan.workload.tensor_parallel == 1:
        fields -= {"sequence_parallel"}
    return JobTerms(**{field: value for field, value in stated.items() if field in fields})


def job_of_plan(plan: Plan, model: Model, **stated: Any) -> Job:
    """Return the job that a plan was made for, as far as the plan states it.

    Args:
        plan: the plan, which gives sequence length, tensor-parallel size and replicas, and if it states them
            the replicas' micro-batches and the job's terms.
        stated: values of further fields of `Job`, which replace those that the plan states.

    Raises:
        HexiError: see `Job`.
    """
    terms = {field: value for field, value in asdict(plan.job).items() if value is not None}
    terms.pop("optimizer", None)
    if "kernel" in terms:
        terms["kernel"] = join_kernels(terms["kernel"])
    terms |= stated
    shares = [replica.micro_batches for replica in plan.replicas]
    if "global_batch_size" not in stated and None not in shares:
        together = sum(share for share in shares if share is not None)
        terms["global_batch_size"] = together * terms.get("micro_batch_size", Job.micro_batch_size)
    return Job(
        model=model,
        seq_length=plan.workload.seq_length,
        # In a plan with units of several sizes each unit states its size.
        tensor_parallel=plan.workload.tensor_parallel or 1,
        data_parallel=len(plan.replicas),
        latent_exchange=plan.workload.latent_exchange is not None,
        **terms,
    )


def _given(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if value is not None}


def _refuse(field: str, value: object, remedy: str) -> NoReturn:
    raise HexiError(f"{spell_flag(field, value)}: {remedy}")
