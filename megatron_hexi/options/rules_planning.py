"""Rules for options that the planner does not model; a plan made by hand may train with them."""

from __future__ import annotations

from megatron_hexi.options.kinds import Refused, Supported, before_planning

_BY_HAND = "use hexi proportion, which needs no model"
_LEAVE = "leave it out"

#: Specifications of layers whose weights other arguments say; pretrain_hybrid.py needs one of a hybrid model.
_KNOWN_SPECS = (
    ("local",),
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)

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
}
