"""Jobs beside which an uneven plan must give the training without one: an option or a few in each.

`CASES` are what the documentation names as the tests of supported options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_hexi.plan import (
    Domain,
    Group,
    LatentColumns,
    Member,
    Plan,
    Replica,
    Stage,
    UnitRates,
    Workload,
    unit_ranks,
)
from tests.megatron.test_uneven_training import SEQ_LENGTH

PIPELINE = ("--pipeline-model-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
VIRTUAL = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
DEEPER = ("--num-layers", "4")
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
)
FURTHER_TOKENS = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")


def balanced(loss: str) -> tuple[str, ...]:
    """Experts with a balancing loss, large enough to be seen."""
    return (*EXPERTS, "--moe-router-load-balancing-type", loss, "--moe-aux-loss-coeff", "0.1")


#: Groups of a domain: segments, then tokens and heads of each member.
type _Domain = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        model: arguments that the run without a plan has too.
        job: arguments of the run under a plan alone.
        reference: arguments of the run without a plan alone.
        corpus: whether both read a data set of many short documents and some long ones.
        replicas: whether the plans have two replicas.
        columns: whether latent columns travel in place of keys and values.
        slow: whether it runs on request only.
    """

    model: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()
    corpus: bool = False
    replicas: bool = False
    columns: bool = False
    slow: bool = False

    @property
    def tensor_parallel(self) -> int:
        return 2 if "--tensor-model-parallel-size" in self.job else 1

    @property
    def model_parallel(self) -> int:
        return self.tensor_parallel * (2 if "--pipeline-model-parallel-size" in self.job else 1)

    @property
    def workload(self) -> Workload:
        latent = "--multi-latent-attention" in self.model
        return Workload(
            *(SEQ_LENGTH, 6, 6 if latent else 2, 16),
            tensor_parallel=self.tensor_parallel,
            value_dim=24 if latent else None,
            latent_exchange=LatentColumns(32, 8) if self.columns else None,
        )

    def plans(self) -> dict[str, Plan]:
        """Plans that are uneven in different ways."""
        heads = 6 // self.tensor_parallel
        of_one: dict[str, _Domain] = {
            # Groups of different size; KV heads used by two members; a shard that no small number divides.
            "groups": (
                (((0, 50), (77, 127)), (51, (0, 2)), (49, (2, heads))),
                (((50, 77),), (27, (0, heads))),
            ),
            "no-heads": ((((0, 127),), (100, (0, heads)), (27, (heads, heads))),),
            "no-tokens": ((((0, 127),), (127, (0, 1)), (0, (1, heads))),),
        }
        if self.replicas:
            pairs: dict[str, tuple[_Domain, ...]] = {
                "replicas": (
                    ((((0, 30), (60, 127)), (97, (0, heads))), (((30, 60),), (30, (0, heads)))),
                    of_one["no-heads"],
                ),
                "replicas-without": (of_one["no-heads"], of_one["no-tokens"]),
            }
        else:
            pairs = {name: (domain,) for name, domain in of_one.items()}
        plans = {
            name: Plan(
                self.workload,
                tuple(_replica(self.workload, domain, number) for number, domain in enumerate(domains)),
            )
            for name, domains in pairs.items()
        }
        if DEALT[0] not in self.job:
            return plans
        return {name: replace(plan, rates=unit_rates(plan.units)) for name, plan in plans.items()}


def unit_rates(units: int) -> UnitRates:
    """Of units of which each takes half as long again as the one before, the last with little memory."""
    slow = [1.5**number for number in range(units)]
    rows, pairs = tuple(1e-6 * one for one in slow), tuple(2e-8 * one for one in slow)
    return UnitRates(rows, pairs, (200,) * (units - 1) + (40,), attended=0.25)


def _replica(workload: Workload, domain: _Domain, number: int) -> Replica:
    ranks = iter(range(number * sum(len(group) - 1 for group in domain), 1000))
    groups = tuple(
        Group(
            segments,
            tuple(Member(unit_ranks(workload, next(ranks)), tokens, heads) for tokens, heads in members),
        )
        for segments, *members in domain
    )
    return Replica((Stage((Domain(groups),)),))


#: The run without a plan has a mask that keeps documents apart, of all pairs of tokens.
APART = ("--reset-attention-mask", "--reset-position-ids")
#: The run under a plan is told where documents end.
PACKED = ("--dataloader-inter-document-masking",)
#: Documents are dealt by units' rates, batch by batch.
DEALT = ("--hexi-batch-shares",)
ONE_EACH = ("--micro-batch-size", "1", "--global-batch-size", "4")
WINDOW = ("--window-size", "19,0")
SINKS = ("--softmax-type", "learnable")

LATENT = (
    *("--multi-latent-attention", "--kv-lora-rank", "32", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "24"),
    # The gradients of keys' biases are nothing but rounding, which the optimizer makes as large as others.
    "--disable-bias-linear",
)
#: Megatron's own attention takes no values of another size without Transformer Engine.
LATENT_SPEC = ("--spec", "tests.megatron.latent_spec", "spec")
#: Latent attention with the norms that the cost model counts.
NORMED_LATENT = (*LATENT, "--qk-layernorm", "--q-lora-rank", "24", "--no-rope-fusion")
NORMED_LATENT_SPEC = ("--spec", "tests.megatron.latent_spec", "normed")
#: Two attention layers and two MLPs.
HYBRID = ("--hybrid-layer-pattern", "*-*-")

CASES = {
    # Attention and positions
    "qk-norm": Case(("--qk-layernorm",), slow=True),
    "qk-l2-norm": Case(("--qk-l2-norm",), slow=True),
    "gated-attention": Case(("--attention-output-gate", "--add-qkv-bias"), slow=True),
    "rope-variants": Case(
        (
            *("--rotary-percent", "0.5", "--rotary-interleaved", "--rotary-base", "5000"),
            *("--rotary-seq-len-interpolation-factor", "2"),
        ),
        slow=True,
    ),
    "rope-scaling": Case(("--use-rope-scaling", "--no-rope-freq", "2"), slow=True),
    "yarn": Case(
        (
            *("--position-embedding-type", "yarn", "--rotary-scaling-factor", "4"),
            *("--yarn-original-max-position-embeddings", "64", "--yarn-beta-fast", "32"),
            *("--yarn-beta-slow", "1", "--mscale", "1", "--mscale-all-dim", "1"),
        ),
        slow=True,
    ),
    "learned-positions": Case(
        (
            *("--position-embedding-type", "learned_absolute", "--reset-position-ids"),
            *("--eod-mask-loss", "--calculate-per-token-loss"),
        )
    ),
    "no-positions": Case(("--position-embedding-type", "none"), slow=True),
    # Masks
    "windows": Case(WINDOW, slow=True),
    "alternating-windows": Case((*WINDOW, *DEEPER, "--window-attn-skip-freq", "2"), slow=True),
    "windows-recomputed": Case(WINDOW, (*FULL, "uniform", *SEQUENCE), slow=True),
    "sinks": Case(SINKS, slow=True),
    "sinks-off-by-one": Case(("--softmax-type", "off-by-one"), slow=True),
    "windows-sinks": Case((*WINDOW, *SINKS), PIPELINE, slow=True),
    "documents": Case(ONE_EACH, PACKED, APART, corpus=True, slow=True),
    "documents-dealt": Case(ONE_EACH, (*PACKED, *DEALT), APART, corpus=True),
    "documents-dealt-recomputed": Case(
        (*ONE_EACH, *SINKS),
        (*PACKED, *DEALT, *FULL, "uniform", *SEQUENCE),
        APART,
        corpus=True,
        slow=True,
    ),
    "documents-dealt-pipeline": Case(ONE_EACH, (*PACKED, *DEALT, *PIPELINE), APART, corpus=True),
    "documents-dealt-interleaved": Case(
        (*ONE_EACH, *DEEPER), (*PACKED, *DEALT, *VIRTUAL, *SEQUENCE), APART, corpus=True, slow=True
    ),
    "documents-dealt-experts": Case(
        (*ONE_EACH, *balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"),
        (*PACKED, *DEALT, *DISTRIBUTED, "--expert-model-parallel-size", "2"),
        APART,
        corpus=True,
        replicas=True,
        slow=True,
    ),
    "documents-learned-positions": Case(
        (*ONE_EACH, "--position-embedding-type", "learned_absolute"), PACKED, APART, corpus=True, slow=True
    ),
    "documents-recomputed": Case(
        ONE_EACH, (*PACKED, *FULL, "uniform", *SEQUENCE), APART, corpus=True, slow=True
    ),
    "documents-pipeline": Case(
        (*ONE_EACH, *DEEPER), (*PACKED, *VIRTUAL, *SEQUENCE), APART, corpus=True, slow=True
    ),
    "documents-replicas": Case(
        ONE_EACH, (*PACKED, *OVERLAPPED), APART, corpus=True, replicas=True, slow=True
    ),
    "documents-experts": Case((*ONE_EACH, *balanced("aux_loss")), PACKED, APART, corpus=True, slow=True),
    "latent": Case(LATENT, reference=LATENT_SPEC, slow=True),
    "latent-yarn": Case(
        (*LATENT, "--rope-type", "yarn", "--rotary-scaling-factor", "4", "--q-lora-rank", "24"),
        (*SEQUENCE, *FULL, "uniform"),
        LATENT_SPEC,
        slow=True,
    ),
    "latent-columns": Case(LATENT, reference=LATENT_SPEC, columns=True),
    "latent-columns-yarn": Case(
        (*LATENT, "--rope-type", "yarn", "--rotary-scaling-factor", "4", "--q-lora-rank", "24"),
        (*SEQUENCE, *FULL, "uniform"),
        LATENT_SPEC,
        columns=True,
        slow=True,
    ),
    "latent-columns-tensor-parallel": Case(
        LATENT, (*TENSOR, *OVERLAPPED), LATENT_SPEC, replicas=True, columns=True, slow=True
    ),
    "latent-columns-windows-sinks": Case(
        (*LATENT, *WINDOW, *SINKS),
        (*PIPELINE, "--recompute-granularity", "selective"),
        LATENT_SPEC,
        columns=True,
        slow=True,
    ),
    "latent-windows-sinks": Case((*LATENT, *WINDOW, *SINKS), PIPELINE, LATENT_SPEC, slow=True),
    # Parallelism
    "tensor-parallel": Case(job=TENSOR, slow=True),
    "sequence-parallel": Case(job=SEQUENCE, slow=True),
    "pipeline": Case(job=PIPELINE, slow=True),
    "virtual-pipeline": Case(DEEPER, VIRTUAL),
    "windows-sinks-interleaved": Case(
        (*WINDOW, *SINKS, *DEEPER, "--window-attn-skip-freq", "2"), VIRTUAL, slow=True
    ),
    "latent-interleaved": Case((*LATENT, *DEEPER), VIRTUAL, LATENT_SPEC, slow=True),
    "experts-interleaved": Case((*balanced("aux_loss"), *DEEPER), VIRTUAL, slow=True),
    "uneven-stages": Case(DEEPER, (*PIPELINE, "--decoder-first-pipeline-num-layers", "1"), slow=True),
    "stage-layout": Case(DEEPER, (*PIPELINE, "--pipeline-model-parallel-layout", "Et|tttL"), slow=True),
    "distributed-optimizer": Case(job=OVERLAPPED, replicas=True, slow=True),
    "small-buckets": Case(
        job=(*DISTRIBUTED, "--overlap-grad-reduce", "--ddp-bucket-size", "1000"), replicas=True, slow=True
    ),
    "tensor-pipeline": Case(job=(*SEQUENCE, *PIPELINE, *DISTRIBUTED), slow=True),
    "tensor-pipeline-data": Case(job=(*SEQUENCE, *PIPELINE, *OVERLAPPED), replicas=True, slow=True),
    "accumulation": Case(("--micro-batch-size", "1", "--global-batch-size", "8"), replicas=True, slow=True),
    # Thresholds are in tokens: 8 and 24 samples.
    "batch-schedule": Case(
        ("--micro-batch-size", "1", "--step-batch-size-schedule", "0:2 1016:4 3048:8"),
        slow=True,
    ),
    # Memory
    "recompute-full": Case(job=(*FULL, "uniform")),
    "recompute-block": Case(job=(*FULL, "block"), slow=True),
    "recompute-selective": Case(job=("--recompute-granularity", "selective"), slow=True),
    "recompute-modules": Case(balanced("aux_loss"), (*SELECTIVE, "core_attn", "mlp", "moe"), slow=True),
    "chunked-layers": Case(("--mlp-chunks-for-training", "2"), slow=True),
    "saved-activations": Case(job=(*TENSOR, *FULL, "uniform", "--distribute-saved-activations"), slow=True),
    # Layers and losses
    "untied": Case(("--untie-embeddings-and-output-weights",), slow=True),
    # Its gradients are rounded to bf16, in one way only where both divide by the tokens at the same place.
    "fused-loss": Case(
        (
            *("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"),
            "--calculate-per-token-loss",
        ),
        slow=True,
    ),
    "maximal-update": Case(("--use-mup", "--mup-base-hidden-size", "48", "--mup-width-mult", "2"), slow=True),
    "multi-token": Case((*FURTHER_TOKENS, "--eod-mask-loss", "--calculate-per-token-loss"), slow=True),
    "multi-token-detached": Case((*FURTHER_TOKENS, "--mtp-detach-heads"), slow=True),
    "multi-token-sequence-parallel": Case(FURTHER_TOKENS, SEQUENCE, slow=True),
    "multi-token-experts": Case(
        (*FURTHER_TOKENS, "--mtp-use-repeated-layer", *balanced("aux_loss")), slow=True
    ),
    "hybrid-model": Case(HYBRID),
    # Experts
    "experts": Case(balanced("aux_loss"), slow=True),
    "experts-seq-loss": Case(balanced("seq_aux_loss"), slow=True),
    "experts-global-loss": Case((*balanced("global_aux_loss"), "--calculate-per-token-loss"), slow=True),
    "experts-z-loss": Case((*balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"), slow=True),
    "experts-bias": Case(
        (
            *EXPERTS,
            *("--moe-router-load-balancing-type", "none", "--moe-router-enable-expert-bias"),
            *("--moe-router-score-function", "sigmoid", "--moe-router-bias-update-rate", "0.01"),
        ),
        slow=True,
    ),
    "experts-gathered": Case((*balanced("aux_loss"), "--moe-token-dispatcher-type", "allgather"), slow=True),
    "experts-parallel": Case(
        (*balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"),
        (*DISTRIBUTED, "--expert-model-parallel-size", "2"),
        replicas=True,
    ),
    "experts-tensor-parallel": Case(
        (*balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"),
        (*SEQUENCE, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
        slow=True,
    ),
    "experts-shared": Case((*balanced("aux_loss"), "--moe-shared-expert-intermediate-size", "64"), slow=True),
    "experts-grouped": Case(
        (
            *balanced("aux_loss"),
            *("--moe-layer-freq", "[0,1]", "--moe-router-num-groups", "2", "--moe-router-group-topk", "1"),
            *(
                "--moe-router-pre-softmax",
                "--moe-router-topk-scaling-factor",
                "2",
                "--moe-router-dtype",
                "fp32",
            ),
        ),
        slow=True,
    ),
}
