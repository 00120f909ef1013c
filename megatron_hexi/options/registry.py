"""The class of every option of Megatron (counted, free, restricting, replaced or refused).

``python -m megatron_hexi.options.registry`` prints the number of options in each class, by version.

Options that have no rule in `refusals.OPTIONS` are listed by their class. One spelling of an option stands
for all its spellings. A name that ends in ``*`` stands for all recorded options that begin with the name,
except options that another line or a rule names.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, get_args

from megatron_hexi.options.parser import HEXI_ROWS, VERSIONS, assumed_series, read_rows
from megatron_hexi.options.refusals import refused, replaced

#: Options that are part of the model, job or plan: times, memory or printed command lines depend on them.
COUNTED: Final = {
    "shapes of the model": """
        --num-layers --encoder-num-layers --hidden-size --ffn-hidden-size --num-attention-heads
        --group-query-attention --num-query-groups --kv-channels --vocab-size --padded-vocab-size
        --make-vocab-size-divisible-by --max-position-embeddings --position-embedding-type
        --use-rotary-position-embeddings --no-position-embedding --swiglu --quick-geglu
        --squared-relu --openai-gelu --untie-embeddings-and-output-weights --disable-bias-linear
        --add-qkv-bias --normalization --qk-layernorm --attention-output-gate --softmax-type
    """,
    "constants of the model": """
        --norm-epsilon --rotary-base --rotary-percent --rotary-interleaved
        --rotary-seq-len-interpolation-factor --use-rope-scaling --rope-scaling-factor
        --rotary-scaling-factor --no-rope-freq --yarn-* --mscale --mscale-all-dim --rope-type
        --qk-l2-norm --apply-layernorm-1p --glu-linear-offset --activation-func-clamp-value
        --use-mup --mup-* --apply-residual-connection-post-layernorm --window-attn-skip-freq
        --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads --mtp-standalone
    """,
    "terms of the job": """
        --seq-length --encoder-seq-length --micro-batch-size --global-batch-size --bf16 --fp16
        --fp8-format --fp8-recipe --first-last-layers-bf16 --num-layers-at-*
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel
        --recompute-activations
    """,
    "what the plan says": """
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --recompute-granularity --recompute-method --recompute-num-layers --calculate-per-token-loss
        --no-create-attention-mask-in-dataloader --pipeline-model-parallel-layout
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --hexi-*
    """,
}

#: Options without influence on a plan, which printed command lines keep.
FREE: Final = {
    "data and tokenizers": """
        --data-path --data-args-path --data-cache-path --data-parallel-random-init --train-data-path
        --valid-data-path --test-data-path --per-split-data-args-path --per-dataset-sequences-path
        --split --mock-data --num-workers --num-dataset-builder-threads --no-mmap-bin-files
        --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --mid-level-dataset-surplus
        --eod-mask-loss --reset-position-ids --object-storage-cache-path --tokenizer-* --tiktoken-*
        --vocab-file --merge-file --vocab-extra-ids --null-tokenizer-* --chat-template
        --trust-remote-code --allow-ambiguous-pad-tokens
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --no-use-tokenizer-model-from-checkpoint-args --sft-tokenizer-prompt-format
        --no-data-sharding --validation-set-names --phase-transition-iterations --test-mode
        --short-seq-prob --mask-prob --fim-* --enable-msc --disable-msc --verify-integrity
    """,
    "the schedule of learning": """
        --lr --lr-* --min-lr --decoupled-lr --decoupled-min-lr --weight-decay
        --weight-decay-incr-style --start-weight-decay --end-weight-decay --apply-wd-to-qk-layernorm
        --no-weight-decay-cond-type --adam-* --sgd-momentum --clip-grad --seed
        --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --init-method-std
        --init-method-xavier-uniform --embedding-init-method-std --loss-scale --initial-loss-scale
        --min-loss-scale --loss-scale-window --hysteresis --lion-* --muon-*
        --use-same-sampling-seed-across-dp-ranks
    """,
    "how long to train, and when to evaluate": """
        --train-iters --train-samples --exit-* --eval-interval --eval-iters --start-eval-at-iter
        --skip-train --train-sync-interval --freeze-all-layers --decrease-batch-size-if-needed
        --adlr-*
    """,
    "checkpoints": """
        --save --save-interval --save-retain-interval --save-params-interval
        --save-tokens-per-expert-interval --load --load-main-params-from-ckpt --finetune
        --pretrained-checkpoint --no-load-* --no-save-* --ckpt-* --no-ckpt-*
        --auto-detect-ckpt-format --use-dist-ckpt --dist-ckpt-* --distrib-optim-* --async-save
        --async-strategy --async-ckpt-* --use-persistent-ckpt-worker
        --non-persistent-global-ckpt-dir --non-persistent-local-* --non-persistent-save-interval
        --replication* --override-ckpt-iteration --exit-on-missing-checkpoint
        --no-strict-fsdp-dtensor-load --no-stream-ckpt-dequant
    """,
    "logs, profiles and watchers": """
        --log-interval --log-device-memory-used --log-energy --log-memory-* --log-num-zeros-in-grad
        --log-params-norm --log-progress --log-straggler --log-throughput --log-timers-to-tensorboard
        --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard
        --no-log-loss-scale-to-tensorboard --logging-level --tensorboard-* --wandb-* --timing-log-*
        --no-barrier-with-level-1-timing --profile --profile-* --pytorch-profiler-*
        --use-pytorch-profiler --record-memory-history --record-shapes --memory-snapshot-path
        --nvtx-ranges --no-one-logger --one-logger-* --app-tag-* --config-logger-dir
        --flight-recorder-* --no-flight-recorder-* --straggler-* --disable-straggler-on-startup
        --run-workload-inspector-server --gpu-sniff-test-interval --check-for-large-grads
        --no-check-for-nan-in-loss-and-grad --rerun-mode --error-injection-* --fault-injector-*
        --result-rejected-tracker-filename --dump-param-to-param-group-map --save-dgrads-interval
        --save-wgrads-interval --save-activations-interval --enable-ft-package --calc-ft-timeouts
        --ft-num-warmup-iters
    """,
    "processes and communicators": """
        --distributed-backend --distributed-timeout-* --disable-gloo-process-groups --local-rank
        --lazy-mpu-init --nccl-communicator-config-path --high-priority-* --use-sharp
        --sharp-enabled-group --use-nccl-ub --disable-symmetric-registration
        --create-all-gather-group --pipeline-model-parallel-comm-backend --use-ring-exchange-p2p
        --manual-gc --manual-gc-interval --no-manual-gc-eval --enable-experimental
        --use-cpu-initialization --no-initialization --te-rng-tracker --inference-rng-tracker
        --init-model-with-meta-device --no-align-* --ddp-bucket-size --ddp-num-buckets --ddp-pad-*
        --ddp-param-* --ddp-reduce-* --no-gradient-reduce-div-fusion --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --microbatch-group-size-per-virtual-pipeline-stage
        --no-scatter-gather-tensors-in-pipeline --symmetric-ar-type
    """,
    "other kernels for the same layers; of some the cost model counts the bytes (cost-model.md)": """
        --transformer-impl --use-flash-attn --use-mcore-models --no-bias-*
        --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
        --no-gradient-accumulation-fusion --disable-jit-fuser --cross-entropy-*
        --fp16-lm-cross-entropy --attention-softmax-in-fp32 --apply-query-key-layer-scaling
        --use-te-activation-func --use-transformer-engine-op-fuser --fused-residual-rmsnorm
        --deterministic-mode --use-fused-weighted-squared-relu --flash-attention-version
        --use-grouped-gemm-for-dense-mlp --no-clone-scatter-output-in-embedding
        --disable-bf16-reduced-precision-matmul --onnx-safe --accumulate-allreduce-grads-in-fp32
    """,
    "the history of the largest values, for scales of --fp8-recipe delayed": """
        --fp8-amax-* --fp8-interval --fp8-margin
    """,
    "types of gradients and of the optimizer's state, by which these are counted": """
        --grad-reduce-in-bf16 --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    """,
    "saves memory that plans do not count on": """
        --main-grads-dtype --mlp-chunks-for-training --empty-unused-memory-level
        --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d
        --use-torch-optimizer-for-cpu-offload --no-pin-cpu-* --wgrad-deferral-limit
        --offload-modules --min-offloaded-tensor-size --activation-offload-fraction
        --delay-offload-* --delta-offload-* --fine-grained-offloading-max-inflight-offloads
        --cpu-offloading-retain-*
    """,
    "read only beside an option that a plan refuses": """
        --rl-* --grpo-* --langrl-env-config --logits-load-decode-threads --logits-load-ignore-errors
        --logits-load-kd-loss-alpha --logits-load-msc-prefetch-depth --logits-load-prefetch-factor
        --logits-save-dtype --logits-save-top-* --fp8-quantizer-factory --fp4-quantizer-factory
        --fp4-recipe --kitchen-* --reuse-grad-buf-for-mxfp8-param-ag
        --keep-fp8-transpose-cache --cuda-graph-modules --cuda-graph-scope --cuda-graph-warmup-steps
        --optimizer-cuda-graph --qk-clip-alpha --qk-clip-threshold --no-tp-comm-*
        --tp-comm-bootstrap-backend --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad
        --data-parallel-sharding-strategy --outer-dp-sharding-strategy --fsdp-* --megatron-fsdp-*
        --enable-full-sharding-in-hsdp --suggested-communication-unit-size
        --torch-fsdp2-no-reshard-after-forward --no-use-layer-wise-param-layout
        --relative-attention-* --dsa-* --no-dsa-*
        --overlap-dispatch-backward-with-experts-wgrad
        --decoder-num-layers --inprocess-*
    """,
    "for models or programs other than the training of a GPT": """
        --inference-* --use-legacy-static-engine --flash-decode --enable-chunked-prefill
        --decode-only-cuda-graphs --mlp-chunks-for-prefill --nccl-all-reduce-for-prefill
        --cache-mla-latents --num-speculative-tokens --max-tokens-to-oom --output-bert-embeddings
        --bert-* --biencoder-* --ict-* --dino-* --vision-* --swin-backbone-type --img-*
        --num-channels --num-classes --patch-dim --classes-fraction --data-per-class-fraction
        --head-lr-mult --iter-per-epoch --mask-factor --mask-type --retriever-* --evidence-data-path
        --titles-data-path --block-data-path --embedding-path --indexer-* --query-in-block-prob
        --use-one-sent-docs --sample-rate --refit-method
    """,
}

#: Options that have an effect only together with another option, whose rule allows some plans.
RESTRICTING: Final = {
    "mixture of experts": """
        --moe-* --expert-model-parallel-size --expert-tensor-parallel-size
        --use-grouped-gemm-for-shared-expert
    """,
    "multi-latent attention": """
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mla-*
    """,
    "hybrid models": "--is-hybrid-model --mamba-* --mtp-hybrid-override-pattern",
    "gated delta nets": """
        --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim --linear-num-*
        --linear-value-head-dim
    """,
    "documents: domains of a stage share samples, and none takes whole micro-batches": (
        "--dataloader-inter-document-masking"
    ),
}


#: Classes of options. `counted`: part of the model, the job or the plan. `free`: without influence on plans.
#: `restricting`: allowed with some plans. `replaced`: the plan does the same in its own way. `refused`:
#: refused by name.
OptionClass = Literal["counted", "free", "restricting", "replaced", "refused"]

#: Flags that printed command lines add if a job lacks them, since no plan trains with Megatron's default.
ADDED: Final = {"--attention-dropout": "0", "--hidden-dropout": "0", "--eval-iters": "0"}


def class_of(flag: str) -> OptionClass:
    """Return the class of an option."""
    return class_and_reason(flag)[0]


def class_and_reason(flag: str) -> tuple[OptionClass, str]:
    """Return the class of an option, and the reason for this class.

    Raises:
        LookupError: the option has no class, or two classes.
    """
    spellings = _spellings()
    named = {answer for spelling in spellings[flag] for answer in _named(spelling)}
    if len(named) != 1:
        raise LookupError(
            f"{flag}: is to have one class, has {sorted(named) or 'none'}; list it in options/registry.py, or"
            " write a rule"
        )
    return named.pop()


@functools.cache
def _spellings() -> Mapping[str, tuple[str, ...]]:
    """Return, for each spelling of an option, all spellings of options that set the same argument."""
    rows: dict[str, set[str]] = {}
    for row in (*read_rows(), *HEXI_ROWS):
        rows.setdefault(row.dest, set()).update(row.flags)
    return {flag: tuple(sorted(flags)) for flags in rows.values() for flag in flags}


def counts() -> Mapping[str, Counter[OptionClass]]:
    """Return, for each version of Megatron, the number of spellings of options in each class."""
    return {
        version: Counter(
            class_of(flag) for row in read_rows() if version in row.versions for flag in row.flags
        )
        for version in VERSIONS
    }


def _named(flag: str) -> list[tuple[OptionClass, str]]:
    """Return each class to which a flag belongs by a rule or a list, with the reason."""
    rules = [rule for rule in refused() if rule.option == flag]
    planning = [rule for rule in rules if rule.beside not in ("any", "script")]
    for rule in rules:
        if rule.beside == "any" and not rule.values and not rule.versions:
            return [("refused", rule.reason)]
    if planning:
        beside = ", ".join(dict.fromkeys(rule.conflicts_with for rule in planning))
        return [("restricting", f"not beside {beside}")]
    instead = [rule.instead for rule in replaced() if rule.option == flag and rule.replaces_itself]
    if instead:
        return [("replaced", instead[0])]
    return _listed(flag) or [("refused", rule.reason) for rule in rules[:1]]


def _listed(flag: str) -> list[tuple[OptionClass, str]]:
    """Return the classes whose lists name a flag, or else the beginning of the flag, with the reason."""
    lists: tuple[tuple[OptionClass, Mapping[str, str]], ...] = (
        ("counted", COUNTED),
        ("free", FREE),
        ("restricting", RESTRICTING),
    )
    words = [
        (word, (name, reason))
        for name, reasons in lists
        for reason, text in reasons.items()
        for word in text.split()
    ]
    exact = [answer for word, answer in words if word == flag]
    return exact or [answer for word, answer in words if word[-1] == "*" and flag.startswith(word[:-1])]


def table() -> str:
    """Return a text table of the number of options in each class, by version of Megatron."""
    names: tuple[OptionClass, ...] = get_args(OptionClass)
    lines = ["Megatron  " + "  ".join(f"{name:>11}" for name in (*names, "all"))]
    for version, version_counts in counts().items():
        numbers = [*(version_counts[name] for name in names), version_counts.total()]
        lines.append(f"{version:8}  " + "  ".join(f"{number:11}" for number in numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())


#: Flags of other programs that mean an option of Megatron (slime's model files).
ELSEWHERE = {"--use-gated-attention": "--attention-output-gate"}
_NEGATIONS = {"no", "disable"}


def nearest_option(flag: str) -> str | None:
    """Return the option that a flag may be a misspelling of; ``None``: no plan trains with one like it."""
    rows = [row for row in (*read_rows(), *HEXI_ROWS) if assumed_series() in row.versions]
    known = [spelling for row in rows for spelling in row.flags]
    near = [ELSEWHERE[flag]] if flag in ELSEWHERE else difflib.get_close_matches(flag, known, 5, 0.8)
    alike = (option for option in near if flag in ELSEWHERE or _is_misspelt(flag, option))
    return next((option for option in alike if option in known and class_of(option) != "refused"), None)


def _is_misspelt(flag: str, option: str) -> bool:
    """Return whether the words of a flag are an option's, but for misspellings or some that are left out."""
    words, others = (text.removeprefix("--").split("-") for text in (flag, option))
    added = [word for word in words if word not in others]
    missing = [word for word in others if word not in words]
    if _NEGATIONS & {*added, *missing}:
        return False
    if not added or not missing:
        return True
    if len(added) == len(missing):
        return all(_ratio(*pair) >= 0.6 for pair in zip(added, missing, strict=True))
    return _ratio("".join(words), "".join(others)) >= 0.9


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
