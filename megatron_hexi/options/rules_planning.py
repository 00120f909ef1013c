"""Rules for options that the planner, the command line or the script megatron_hexi.pretrain_gpt lacks."""

from __future__ import annotations

from megatron_hexi.options.kinds import Refused, Supported, before_planning, beside_script, given

_BY_HAND = "use hexi proportion, which needs no model"

_LEAVE = "leave it out"

#: Specifications of layers whose weights other arguments say; pretrain_hybrid.py needs one of a hybrid model.
_KNOWN_SPECS = (
    ("local",),
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)

_REMOVED = "Megatron refuses it"

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Planning": (
        before_planning("--moe-latent-size", "the weights around latent experts are not counted", _BY_HAND),
        before_planning("--mtp-use-repeated-layer", "prediction layers are counted one by one", _BY_HAND),
        before_planning(
            "--hybrid-override-pattern", "it is an older name", "give --hybrid-layer-pattern in its place"
        ),
        Refused(
            "--spec",
            lambda args: args.spec is not None and tuple(args.spec) not in _KNOWN_SPECS,
            "the weights of its layers are not known",
            _BY_HAND,
            "any but local and Megatron's of hybrid models",
            beside="planned",
        ),
        before_planning("--distribute-saved-activations", "the planner chooses what is recomputed", _LEAVE),
        before_planning("--fp32-residual-connection", "activations are counted in 16 bits", _BY_HAND),
        before_planning(
            "--use-checkpoint-args",
            "the model is read from a checkpoint",
            "write its arguments into the file",
        ),
        before_planning("--use-mp-args-from-checkpoint-args", "the plan says which ranks hold what", _LEAVE),
        before_planning(
            "--no-pad-vocab-size", "Megatron builds no model without a padded vocabulary", _LEAVE
        ),
        before_planning("--step-batch-size-schedule", "the planner assumes one batch size", _BY_HAND),
    ),
    "Command line": (
        given("--yaml-cfg", "it replaces the command line that a plan is checked against", "give flags"),
        given("--batch-size", _REMOVED, "give --micro-batch-size"),
        given("--warmup", _REMOVED, "give --lr-warmup-fraction"),
        given("--model-parallel-size", _REMOVED, "give --tensor-model-parallel-size"),
        given("--checkpoint-activations", _REMOVED, "give --recompute-activations"),
        given("--fake-process-group", "ranks under a plan exchange keys and values"),
        given(
            "--inprocess-restart",
            "the watch of a plan's ranks ends all of them when one is lost, and a plan's groups, sizes and "
            "split tables stay in the process",
            "start the job under megatron_hexi.elastic",
        ),
        given("--use-legacy-models", "a plan replaces layers of Megatron Core", versions=">=0.17,<0.18"),
    ),
    "The script megatron_hexi.pretrain_gpt": (
        beside_script("--fim-data"),
        beside_script("--logits-load-dir"),
        beside_script("--logits-save-dir"),
        beside_script("--hybrid-context-parallel"),
        beside_script("--overlap-moe-expert-parallel-comm"),
        beside_script("--check-for-spiky-loss"),
        beside_script("--perform-rl-step"),
        beside_script("--inprocess-restart"),
        beside_script("--yaml-cfg"),
        beside_script("--sft", until="0.19"),
        beside_script("--hybrid-layer-pattern", until="0.19"),
        beside_script("--hybrid-override-pattern", until="0.19"),
        beside_script("--experimental-attention-variant", until="0.19"),
        beside_script("--heterogeneous-layers-config-path", until="0.19"),
    ),
}
