"""Lists of all options of Megatron that have no rule in `rule_table`, by their class.

One spelling of an option stands for all its spellings. A name that ends in ``*`` stands for all recorded
options that begin with the name, except options that another line or a rule names.
"""

from __future__ import annotations

from typing import Final

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
        --log-progress --log-straggler --log-throughput --log-timers-to-tensorboard
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
    "saves memory that plans do not count on": """
        --grad-reduce-in-bf16 --main-grads-dtype --main-params-dtype --exp-avg-dtype
        --exp-avg-sq-dtype --mlp-chunks-for-training --empty-unused-memory-level
        --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d
        --use-torch-optimizer-for-cpu-offload --no-pin-cpu-* --wgrad-deferral-limit
        --offload-modules --min-offloaded-tensor-size --activation-offload-fraction
        --delay-offload-* --delta-offload-* --fine-grained-offloading-max-inflight-offloads
        --cpu-offloading-retain-*
    """,
    "read only beside an option that a plan refuses": """
        --rl-* --grpo-* --langrl-env-config --logits-load-decode-threads --logits-load-ignore-errors
        --logits-load-kd-loss-alpha --logits-load-msc-prefetch-depth --logits-load-prefetch-factor
        --logits-save-dtype --logits-save-top-* --fp8-amax-* --fp8-interval --fp8-margin
        --fp8-recipe --fp8-quantizer-factory --no-fp8-wgrad
        --first-last-layers-bf16 --num-layers-at-* --fp4-quantizer-factory
        --fp4-recipe --te-precision-config-file --kitchen-* --reuse-grad-buf-for-mxfp8-param-ag
        --keep-fp8-transpose-cache --cuda-graph-modules --cuda-graph-scope --cuda-graph-warmup-steps
        --optimizer-cuda-graph --qk-clip-alpha --qk-clip-threshold --no-tp-comm-*
        --tp-comm-bootstrap-backend --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad
        --data-parallel-sharding-strategy --outer-dp-sharding-strategy --fsdp-* --megatron-fsdp-*
        --enable-full-sharding-in-hsdp --suggested-communication-unit-size
        --torch-fsdp2-no-reshard-after-forward --no-use-layer-wise-param-layout
        --relative-attention-* --mrope-section --dsa-* --no-dsa-*
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
