"""Kinds of models in Megatron Bridge's loop on its ranks, in several jobs one after the other.

Run `bridge_models` by `bridge_models_run`, with a folder and names of `JOBS`. On one rank each job's model
trains by Bridge alone, with Megatron's own layers; on four the job trains under its plan.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils import checkpoint_utils
from megatron.bridge.training.vlm_step import forward_step as vision_step
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_hexi.megatron.stages.stage_checkpoints import whole_models
from tests.megatron import bridge_vision, latent_spec
from tests.megatron.bridge_ranks import ITERATIONS, SHARED, Results, configuration

#: As the recipes of DeepSeek and Qwen give their layers.
OWN_LAYERS = functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=False)
TE_LAYERS = functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": False,
    "add_bias_linear": False,
    "gated_linear_unit": True,
}
LATENT = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "num_query_groups": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "apply_rope_fusion": False,
}
#: Fields of the model of `configuration` that every job has.
GIVEN = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "seq_length"),
    *("position_embedding_type", "attention_dropout", "hidden_dropout", "gradient_accumulation_fusion"),
    *("share_embeddings_and_output_weights", "masked_softmax_fusion", "cross_entropy_loss_fusion"),
)
#: A model by its fields, beside those of every job.
MODELS: dict[str, tuple[Callable[..., GPTModelProvider], dict[str, Any]]] = {
    "dense": (GPTModelProvider, {"gated_linear_unit": True}),
    "experts": (GPTModelProvider, EXPERTS),
    "latent": (MLAModelProvider, LATENT),
}


class Job(NamedTuple):
    """A model under a plan.

    Args:
        model: its name; with vision a further word is what trains in it (`bridge_vision.TRAINED`).
        plan: the plan's name; empty: Bridge alone, which shares out samples.
        fields: further fields of the model, which the reference lacks.
        load: a job from whose checkpoint it goes on, or the reference ``alone``.
        samples: sequences of a micro-batch; the reference has one.
        packs: whether these are the documents of one sequence.
    """

    model: str
    plan: str
    fields: dict[str, Any] = {}  # noqa: RUF012
    precision: str | None = None
    load: str | None = None
    samples: int = 1
    packs: bool = False

    @property
    def reference(self) -> tuple[str, str | None]:
        return self.model, self.precision


#: Two stages of two chunks each.
INTERLEAVED = {
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
JOBS = {
    "dense-chunks": Job("dense", "pipeline", INTERLEAVED),
    "vision-chunks": Job("vision", "pipeline", INTERLEAVED),
    "experts": Job("experts", "groups"),
    "latent": Job("latent", "units"),
    "dense-bf16": Job("dense", "stages", precision="bf16_mixed"),
    "experts-te": Job(
        "experts", "unit-stages", {"transformer_layer_spec": TE_LAYERS, "sequence_parallel": True}
    ),
    "qwen3": Job("qwen3", "stages", {"transformer_layer_spec": TE_LAYERS}),
    "qwen3-units": Job("qwen3", "unit-stages"),
    "qwen3-groups": Job("qwen3", "groups"),
    "latent-te": Job("latent", "stages", {"transformer_layer_spec": TE_LAYERS}),
    "vision": Job("vision", "dealt"),
    "vision3": Job("vision3", "dealt"),
    "vision3e": Job("vision3e", "groups"),
    "vision3-pipeline": Job("vision3", "pipeline", {"pipeline_model_parallel_size": 2}),
    "vision-pipeline": Job("vision", "pipeline", {"pipeline_model_parallel_size": 2}),
    "vision-units": Job("vision", "even-units", {"sequence_parallel": True, "seq_length": 102}),
    "vision3-units": Job("vision3", "even-units", {"sequence_parallel": True, "seq_length": 102}),
    "vision3-heads": Job("vision3", "units"),
    "vision-packed": Job("vision", "packed", samples=2, packs=True),
    "vision3-packed": Job(
        "vision3", "packed-units", {"sequence_parallel": True, "seq_length": 102}, samples=2, packs=True
    ),
    "vision-on": Job("vision", "pipeline", {"pipeline_model_parallel_size": 2}, load="vision"),
    "vision-back": Job("vision", "", load="vision"),
    "vision-stages": Job("vision", "dealt-stages"),
    "vision3-stages": Job("vision3", "dealt-stages"),
    "vision-first-units": Job("vision", "first-units", {"sequence_parallel": True, "seq_length": 102}),
    "vision-last-units": Job("vision", "last-units", {"sequence_parallel": True, "seq_length": 102}),
    "vision-apart": Job("vision", "apart"),
    "vision-samples": Job("vision", "samples", samples=2),
    "vision3-samples": Job("vision3", "samples", samples=2),
    "vision-stages-on": Job("vision", "groups", load="vision-first-units"),
    "vision-stages-back": Job("vision", "", load="vision-first-units"),
    "vision-stages-there": Job("vision", "dealt-stages", load="alone"),
    "vision3e-stages": Job("vision3e", "dealt-stages", load="alone"),
    "vision-there": Job("vision", "groups", load="alone"),
    "vision3-on": Job("vision3", "pipeline", {"pipeline_model_parallel_size": 2}, load="vision3"),
    "vision3e-back": Job("vision3e", "", load="vision3e"),
    "vision-turns": Job("vision", "turns"),
    "vision-sole-turns": Job("vision", "sole-turns"),
    "vision3-sole-turns": Job("vision3", "sole-turns"),
    "vision-unit-turns": Job("vision", "unit-turns", {"sequence_parallel": True, "seq_length": 102}),
    "vision-interleaved": Job("vision", "interleaved"),
    "vision-turns-back": Job("vision", "", load="vision-turns"),
    "vision-turns-there": Job("vision", "turns", load="alone"),
    "vision-videos": Job("vision-videos", "dealt-stages"),
    "vision-videos-packed": Job("vision-videos", "packed", samples=2, packs=True),
    "vision3-videos": Job("vision3-videos", "dealt"),
    "vision-encoder-turns": Job("vision-encoder", "turns"),
    "vision-decoder-turns": Job("vision-decoder", "turns"),
    "vision-lora-turns": Job("vision-lora", "turns"),
    "vision-packed-turns": Job("vision", "packed-turns", samples=2, packs=True),
    "vision-packed-stages": Job("vision", "packed-stages", samples=2, packs=True),
    "vision3-again": Job("vision3", "dealt", AGAIN),
    "vision-halved": Job("vision", "dealt-stages"),
    "vision-encoder-stages": Job("vision-encoder", "dealt-stages"),
    "vision-decoder-stages": Job("vision-decoder", "dealt-stages"),
    "vision-lora-stages": Job("vision-lora", "dealt-stages"),
    "vision-encoder": Job("vision-encoder", "pipeline", {"pipeline_model_parallel_size": 2}),
    "vision-decoder": Job("vision-decoder", "dealt"),
    "vision-lora": Job("vision-lora", "dealt"),
    "vision3-lora": Job("vision3-lora", "groups"),
}
#: Jobs and references that are saved when half of their iterations are done.
SAVED = {job.load if job.load != "alone" else f"{job.model}-None-alone" for job in JOBS.values() if job.load}
Cell = tuple[tuple[int, int], ...]


def parts(module: Any) -> Iterator[tuple[str, Cell, tuple[int, ...], torch.Tensor]]:
    """Yield name, box and whole shape of each part of a weight that a rank holds, and the part itself."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for leaf in nested_values(module.sharded_state_dict(metadata=metadata)):
        built = nested_values([leaf.build()]) if isinstance(leaf, ShardedTensorFactory) else [leaf]
        for tensor in built:
            if isinstance(tensor, ShardedTensor):
                shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
                ends = map(sum, zip(tensor.global_offset, shape, strict=True))
                cell = tuple(zip(tensor.global_offset, ends, strict=True))
                yield tensor.key, cell, tensor.global_shape, tensor.data.detach().view(shape)


def fill(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Initialise matrices in the same way under every layout."""
    for chunk in model:
        for name, cell, shape, part in parts(chunk):
            if "bias" in name:
                part.zero_()
            elif "norm" not in name:
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = torch.randn(shape, generator=draw) * 0.05
                part.copy_(whole[tuple(slice(*axis) for axis in cell)])
    return model


class Boxes(Results):
    """Saves losses, and each weight by the part of the whole weight that a rank holds."""

    def on_train_end(self, context: CallbackContext) -> None:
        with whole_models(context.model):
            weights = {
                (name, cell): part.clone()
                for chunk in context.model
                for name, cell, _, part in parts(chunk.module)
            }
        torch.save((self._losses, weights), self._out / f"{self._name}-{dist.get_rank()}.pt")


def model_configuration(
    out: Path, model: str, precision: str | None, imports: bool = True, **fields: Any
) -> ConfigContainer:
    """Return a job's configuration, as Bridge's recipes give it.

    Args:
        imports: whether the job begins with the Hugging Face weights of a model that has some.
    """
    config = configuration(**SHARED)
    known = {name: getattr(config.model, name) for name in GIVEN}
    given = {"transformer_layer_spec": OWN_LAYERS, "vocab_size": 256}
    kind, _, trained = model.partition("-")
    if model in MODELS:
        provider, own = MODELS[model]
        config.model = provider(**(known | given | own | fields))
        config.model.register_pre_wrap_hook(fill)
    else:
        config.model = AutoBridge.from_hf_pretrained(out / kind).to_megatron_provider(imports)
        if kind in bridge_vision.KINDS:
            given |= {"transformer_layer_spec": TE_LAYERS} | bridge_vision.FIELDS
        for name, value in (known | given | fields).items():
            setattr(config.model, name, value)
    if kind in bridge_vision.KINDS:
        bridge_vision.show_images(config, trained, out / kind)
    config.mixed_precision = precision
    return config


def train(train: Any, out: Path, name: str, model: str, config: ConfigContainer, **plan: Any) -> None:
    """Train, and save losses and weights under a name."""
    kind, _, trained = model.partition("-")
    is_whole = kind in bridge_vision.KINDS and trained != "lora"
    watchers: list[Callback] = [Boxes(out, name)]
    if is_whole and not config.checkpoint.load:
        watchers.append(bridge_vision.RoundTrip(out / kind))
    if name == "vision-halved":
        watchers.append(bridge_vision.Halved())
    if name in SAVED:
        config.checkpoint.save, config.checkpoint.save_interval = str(out / f"saved-{name}"), ITERATIONS // 2
        config.checkpoint.dist_ckpt_optim_fully_reshardable = True
    step = vision_step if kind in bridge_vision.KINDS else forward_step
    if kind in bridge_vision.KINDS and not plan:
        # Bridge's buckets would wait for an encoder that a batch without images does not call.
        config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    train(config, step, callbacks=watchers, **plan)


def write_imported(out: Path) -> None:
    """Write the models that are imported from Hugging Face, with random weights."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **heads, intermediate_size=96, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(out / "qwen3")
    bridge_vision.write(out, sizes | heads)


def main() -> None:
    folder, *names = sys.argv[1:]
    out = Path(folder)
    dist.init_process_group("gloo")
    if dist.get_world_size() == 1:
        write_imported(out)
        for model, precision in dict.fromkeys(JOBS[name].reference for name in names):
            for kind in dict.fromkeys((None, precision)):
                # Megatron's own attention takes no latent layers.
                fields = {"transformer_layer_spec": latent_spec.normed} if model == "latent" else {}
                config = model_configuration(out, model, kind, **fields)
                train(pretrain, out, f"{model}-{kind}-alone", model, config)
        return
    from megatron_hexi import bridge
    from megatron_hexi.megatron.session import set_given_plan

    for name in names:
        job = JOBS[name]
        config = model_configuration(out, job.model, job.precision, job.load is None, **job.fields)
        config.train.micro_batch_size = job.samples
        if job.packs:
            config.dataset.enable_in_batch_packing = True
        if job.load:
            checkpoint_utils.read_train_state.cache_clear()
            saved = f"{job.model}-None-alone" if job.load == "alone" else job.load
            config.checkpoint.load, config.checkpoint.ckpt_step = str(out / f"saved-{saved}"), ITERATIONS // 2
            config.scheduler.override_opt_param_scheduler = True
        if job.plan:
            plan = out / f"{job.plan}-{job.model.partition('-')[0]}.yaml"
            train(bridge.pretrain, out, name, job.model, config, plan=plan)
        else:
            set_given_plan(None)
            train(pretrain, out, name, job.model, config)
