"""Words that Megatron's own checks refuse, by the name of the rule that refuses them before."""

from __future__ import annotations

from megatron_hexi.options.refusals import refused

_LATENT = (
    "--multi-latent-attention --no-rope-fusion --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
)
_WORDS = {
    "--mtp-num-layers": "--mtp-num-layers 1 --position-embedding-type learned_absolute",
    "--max-position-embeddings": "--position-embedding-type learned_absolute --max-position-embeddings 8",
    "--group-query-attention": f"{_LATENT} --group-query-attention --num-query-groups 2",
    "--rotary-interleaved": f"{_LATENT} --rotary-interleaved",
    "--experimental-attention-variant": "--experimental-attention-variant gated_delta_net",
    "--glu-linear-offset": "--glu-linear-offset 1.0",
    "--use-te-activation-func": "--use-te-activation-func",
    "--fused-residual-rmsnorm": "--fused-residual-rmsnorm --normalization LayerNorm",
    "--moe-router-topk": "--num-experts 4 --moe-router-topk 1",
    "--moe-router-enable-expert-bias": "--num-experts 4 --moe-router-enable-expert-bias",
    "--moe-aux-loss-coeff": (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1"
    ),
    "--moe-router-group-topk": "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
    "--moe-ffn-hidden-size": "--moe-ffn-hidden-size 64",
    "--moe-shared-expert-intermediate-size": "--num-experts 4 --moe-shared-expert-intermediate-size 0",
    "--recompute-method": "--recompute-granularity selective --recompute-method uniform",
    "--recompute-modules-moe_act": "--recompute-granularity selective --recompute-modules moe_act",
    "--recompute-modules-mla_up": "--recompute-granularity selective --recompute-modules mla_up_proj",
    "--cross-entropy-fusion-impl": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "--min-lr": "--min-lr 1.0",
    "--lr-warmup-fraction": "--train-iters 10 --lr-warmup-fraction 0.1 --lr-warmup-iters 2",
    "--weight-decay-incr-style": "--weight-decay-incr-style linear",
    "--save-retain-interval": "--save out --save-interval 2 --save-retain-interval 3",
    "--log-memory-interval": "--log-interval 2 --log-memory-interval 3",
    "--load-main-params-from-ckpt": "--load-main-params-from-ckpt",
    "--override-ckpt-iteration": "--override-ckpt-iteration 3 --finetune",
    "--moe-use-upcycling": "--moe-use-upcycling",
    "--ckpt-format": "--ckpt-format torch_dcp",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload",
    "--num-dataset-builder-threads": "--num-dataset-builder-threads 0",
    "--ckpt-convert-format": "--ckpt-convert-format torch",
    "--non-persistent-ckpt-type": "--non-persistent-ckpt-type in_memory",
    "--moe-latent-size": "--moe-latent-size 0",
    "--moe-flex-dispatcher-backend": "--num-experts 4 --moe-flex-dispatcher-backend ncclep",
    "--inference-batch-times-seqlen-threshold": "--inference-batch-times-seqlen-threshold 8",
    "--mla-down-proj-fusion": "--mla-down-proj-fusion",
    "--mock-data": "--mock-data --data-path text",
}
#: Words by rule.
CONTRADICTIONS = {
    rule.name: words
    for rule in refused()
    if rule.against
    for start, words in _WORDS.items()
    if start == rule.option or rule.name.startswith(f"{start}_")
}
