"""Rules for options that the command line or the training script ``megatron_hexi.pretrain_gpt`` lacks."""

from __future__ import annotations

from megatron_hexi.options.kinds import Refused, Supported, beside_script, given

_REMOVED = "Megatron refuses it"


OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Command line": (
        given(
            "--yaml-cfg",
            "it replaces the command line that a plan is checked against",
            "give flags",
        ),
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
        given("--use-legacy-models", "a plan replaces layers of Megatron Core", since="0.17", until="0.18"),
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
