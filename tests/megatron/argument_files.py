"""Files of Megatron's arguments as people have them, scaled down: models and jobs of public repositories.

Sizes, paths and tokenizers are other ones, so that a job trains in seconds without data; flags, their
spellings and the form of the file are those of the source.
"""

from __future__ import annotations

_SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
_GROUPED = "--group-query-attention --num-query-groups 2"

#: Models, by the file that they follow.
MODELS = {
    # THUDM/slime: scripts/models/qwen3-8B.sh
    "qwen3": f"""\
MODEL_ARGS=(
   --swiglu
   {_SMALL}
   --ffn-hidden-size 96
   {_GROUPED}
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   --rotary-base 1000000
   --vocab-size 151
   --kv-channels 32
   --qk-layernorm
   --untie-embeddings-and-output-weights
)""",
    # THUDM/slime: scripts/models/qwen2.5-7B.sh
    "qwen2.5": f"""\
MODEL_ARGS=( --swiglu {_SMALL} --ffn-hidden-size 96 {_GROUPED} --use-rotary-position-embeddings
   --disable-bias-linear --add-qkv-bias --normalization "RMSNorm" --norm-epsilon 1e-06 --rotary-base 1000000
   --vocab-size 152 --untie-embeddings-and-output-weights )
""",
    # THUDM/slime: scripts/models/llama3.1-8B-Instruct.sh
    "llama3.1": f"""\
MODEL_ARGS=(
   --swiglu {_SMALL} --ffn-hidden-size 96 {_GROUPED}
   --max-position-embeddings 131072   # more than the job's
   --use-rotary-position-embeddings --disable-bias-linear --normalization "RMSNorm" --norm-epsilon 1e-5
   --rotary-base 500000 --vocab-size 128 --kv-channels 16 --use-rope-scaling --rotary-scaling-factor 8.0
   --untie-embeddings-and-output-weights
)
""",
    # NVIDIA/Megatron-LM: examples/post_training/modelopt/conf/Qwen/Qwen3-8B.sh
    "modelopt-qwen3": f"""\
MODEL_ARGS=" \\
    --no-masked-softmax-fusion \\
    --disable-bias-linear \\
    --untie-embeddings-and-output-weights \\
    --position-embedding-type rope \\
    --no-rope-fusion \\
    --normalization RMSNorm \\
    --swiglu \\
    {_SMALL} --ffn-hidden-size 96 {_GROUPED} \\
    --kv-channels 32 \\
    --qk-layernorm \\
    --max-position-embeddings 40960 \\
    --vocab-size 149 \\
    --make-vocab-size-divisible-by 37 \\
    --use-mcore-models \\
    --rotary-percent 1.0 \\
    --rotary-base 1000000 \\
    --no-bias-swiglu-fusion \\
"
""",
    # NVIDIA/Megatron-LM: examples/post_training/modelopt/conf/nvidia/Nemotron-Mini-4B-Instruct.sh
    "nemotron": f"""\
MODEL_ARGS=" \\
    --no-masked-softmax-fusion --disable-bias-linear --untie-embeddings-and-output-weights \\
    --use-rotary-position-embeddings --rotary-percent 0.5 --no-rope-fusion --no-position-embedding \\
    --normalization LayerNorm --squared-relu {_SMALL} --ffn-hidden-size 192 {_GROUPED} \\
    --max-position-embeddings 4096 --vocab-size 256 --make-vocab-size-divisible-by 1 --rotary-base 10000 \\
"
""",
    # NVIDIA/Megatron-LM: examples/llama/train_llama3_8b_h100_fp8.sh, without fp8 and --attention-backend
    "llama3": f"""\
MODEL_ARGS=(
    --use-mcore-models
    {_SMALL}
    --ffn-hidden-size 224
    {_GROUPED}
    --kv-channels 16
    --max-position-embeddings 64
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --init-method-std 0.0134
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --vocab-size 128
)
""",
    # NVIDIA/Megatron-LM: examples/gpt3/train_gpt3_175b_distributed.sh
    "gpt3": f"""\
{_SMALL} \\
--max-position-embeddings 64 \\
--attention-backend auto \\
--vocab-size 503
""",
    # alibaba/Pai-Megatron-Patch: examples/llama2/run_pretrain_mcore_llama.sh
    "llama2": f"""\
--swiglu --normalization RMSNorm --use-rotary-position-embeddings --position-embedding-type rope
--untie-embeddings-and-output-weights --disable-bias-linear --norm-epsilon 1e-5 {_SMALL} --ffn-hidden-size 176
--vocab-size 320 --max-position-embeddings 64 --rotary-seq-len-interpolation-factor 1
""",
    # microsoft/Megatron-DeepSpeed: examples_deepspeed/pretrain_llama2_distributed.sh, by Megatron's flags
    "llama2-deepspeed": f"""\
{_SMALL} --ffn-hidden-size 176 --num-query-groups 2 --group-query-attention --vocab-size 320
--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings
--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear
""",
    # THUDM/slime: scripts/models/qwen3-next-80B-A3B.sh: its attention, as a dense model
    "gated-attention": f"""\
MODEL_ARGS=(
   --disable-bias-linear --qk-layernorm {_GROUPED} --kv-channels 32 {_SMALL} --ffn-hidden-size 96
   --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 0.25 --swiglu
   --untie-embeddings-and-output-weights --vocab-size 248 --rotary-base 10000000
   # of this model
   --attention-output-gate
)
""",
}

#: Jobs, by the file that they follow.
JOBS = {
    # NVIDIA/Megatron-LM: examples/gpt3/train_gpt3_175b_distributed.sh
    "gpt3": """\
--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.95 --clip-grad 1.0 --bf16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
--lr-warmup-fraction .001 --lr-decay-iters 430 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
--split 949,50,1 --log-interval 100 --eval-interval 1000 --eval-iters 0
""",
    # NVIDIA/Megatron-LM: examples/llama/train_llama3_8b_h100_fp8.sh
    "llama3": """\
TRAINING_ARGS=(
    --seq-length 64
    --micro-batch-size 1
    --global-batch-size 4
    --train-samples 12
    --lr-decay-samples 1949218
    --lr-warmup-samples 3906
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of AdamW
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
MODEL_PARALLEL_ARGS=( --tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel )
TRAINING_ARGS+=( --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather )
DATA_ARGS=( --mock-data --tokenizer-type NullTokenizer --tiktoken-pattern v2 --split '99,1,0'
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 )
LOGS=( --log-interval 1 --eval-iters 0 --eval-interval 100 --log-throughput --ckpt-format torch_dist
    --distributed-timeout-minutes 60 )
""",
    # THUDM/slime: scripts/run-qwen3-4B.sh, its flags of Megatron
    "slime": """\
PERF_ARGS=(
   --seq-length 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 3
   --tensor-model-parallel-size 1
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
)
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
   --adam-beta2 0.98 )
MISC_ARGS=( --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32 --bf16 )
""",
    # alibaba/Pai-Megatron-Patch: examples/llama3_1/run_mcore_llama3_1.sh
    "pai": """\
--micro-batch-size 1 --global-batch-size 4 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008 --attention-dropout 0.0
--hidden-dropout 0.0 --lr-decay-iters 100 --lr-warmup-iters 10 --train-iters 3 --seq-length 64
--log-interval 1 --eval-interval 10000 --eval-iters 0 --tensor-model-parallel-size 1 --no-load-optim
--no-load-rng --num-workers 2
--seed 1234 --use-flash-attn --distributed-backend nccl --eod-mask-loss
""",
    # NVIDIA/Megatron-LM: tests/functional_tests/test_cases/gpt/…/model_config.yaml, as a command line
    "functional-test": """\
--seq-length 64 --micro-batch-size 2 --global-batch-size 8 --timing-log-level 0 --lr-decay-iters 320
--split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 --eval-interval 1000
--eval-iters 0 --no-gradient-accumulation-fusion --attention-softmax-in-fp32 --use-mcore-models
--no-bias-swiglu-fusion --no-rope-fusion --log-num-zeros-in-grad --log-memory-to-tensorboard
--recompute-activations --fp16 --initial-loss-scale 1024
""",
}


def _file(model: str, job: str) -> str:
    """Model and job in one file: where one has a wrapper, so has the other."""
    parts = [MODELS[model], JOBS[job]]
    if any("ARGS=" in part for part in parts):
        parts = [part if "ARGS=" in part else f"OTHER_ARGS=(\n{part})\n" for part in parts]
    return "\n".join(parts)


#: Fifty files: each model with each job, by name.
FILES = {f"{model}-by-{job}": _file(model, job) for model in MODELS for job in JOBS}
#: LiquidAI/LFM2-1.2B: config.json, in the words that this package has for its layers.
LFM2 = f"""\
MODEL_ARGS=(
   --num-layers 4 --hybrid-layer-pattern C-*- --linear-conv-kernel-dim 3 --hidden-size 64
   --num-attention-heads 4 --ffn-hidden-size 96 {_GROUPED} --qk-layernorm --swiglu
   --normalization RMSNorm --norm-epsilon 1e-5
   --position-embedding-type rope --rotary-base 1000000 --disable-bias-linear --vocab-size 256
)
"""
FILES["lfm2-by-slime"] = LFM2 + JOBS["slime"]
