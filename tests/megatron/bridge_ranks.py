"""A script of Megatron Bridge on its ranks, which trains in several jobs one after the other.

Run `bridge_script` by `bridge_run`, with a folder for the results and options of the first job. On one rank
it trains by Bridge alone; with ``--hexi-plan`` under that plan first, then under the folder's others. On one
rank again it goes on from a checkpoint of theirs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.data import samplers
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.utils import checkpoint_utils

from megatron_hexi.megatron.stages.stage_checkpoints import whole_models
from tests.megatron import te_emulated

te_emulated.use_torch_in_megatron()

ITERATIONS, LENGTH = 10, 101
#: As in Bridge's recipes.
SHARED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "average_in_collective": True,
}


def by_size(weight: torch.Tensor) -> torch.Tensor:
    """Initialise a weight by nothing but its size: Bridge's own seeds differ by stage."""
    random = torch.Generator().manual_seed(weight.numel())
    with torch.no_grad():
        return weight.copy_(torch.randn(weight.shape, generator=random) * 0.05)


def configuration(iterations: int = ITERATIONS, **ddp: Any) -> ConfigContainer:
    methods = dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), by_size)
    # What a CPU cannot do; the layers are Megatron's own.
    fused = ("gradient_accumulation_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion")
    model = GPTModelProvider(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=LENGTH,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        vocab_size=128,
        share_embeddings_and_output_weights=False,
        transformer_layer_spec=local_layer_spec,
        **dict.fromkeys(fused, False),
        **methods,
    )
    return ConfigContainer(
        train=TrainingConfig(train_iters=iterations, global_batch_size=4, micro_batch_size=1),
        model=model,
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-3, clip_grad=1.0),
        ddp=DistributedDataParallelConfig(**ddp),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        dataset=MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=CheckpointConfig(),
        dist=DistributedInitConfig(distributed_backend="gloo"),
        validation=ValidationConfig(eval_iters=1, eval_interval=ITERATIONS),
    )


def saving(folder: Path, **ddp: Any) -> ConfigContainer:
    """Return the first half of a job, which is saved."""
    config = configuration(ITERATIONS // 2, **ddp)
    config.checkpoint.save, config.checkpoint.save_interval = str(folder), ITERATIONS // 2
    return config


def loading(folder: Path, **ddp: Any) -> ConfigContainer:
    """Return the second half of a job."""
    checkpoint_utils.read_train_state.cache_clear()  # the training before changed what it had read
    config = configuration(**ddp)
    config.checkpoint.load, config.scheduler.override_opt_param_scheduler = str(folder), True
    return config


class Results(Callback):
    """Saves losses and weights at the end of a training."""

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self._losses: list[float] = []

    def on_train_step_end(self, context: CallbackContext) -> None:
        if context.loss_dict:
            self._losses.append(float(context.loss_dict["lm loss"]))

    def on_eval_end(self, context: CallbackContext) -> None:
        if context.total_loss_dict and len(self._losses) == ITERATIONS:
            self._losses.append(float(context.total_loss_dict["lm loss"]))

    def on_train_end(self, context: CallbackContext) -> None:
        module, weights = context.model[0].module, {}
        with whole_models(context.model):
            for key, weight in module.named_parameters():
                parts = key.split(".")
                if parts[:2] == ["decoder", "layers"]:  # a stage counts its own layers from 0
                    parts[2] = str(module.get_submodule(".".join(parts[:3])).layer_number - 1)
                weights[".".join(parts)] = weight.detach().clone()
        torch.save((self._losses, weights), self._out / f"{self._name}-{dist.get_rank()}.pt")


class OwnModel(GPTModelProvider):
    """A provider that changes what it builds, as Gemma's scales embeddings."""

    def provide(self, *args: Any, **kwargs: Any) -> Any:
        return super().provide(*args, **kwargs)


class ImageModel(OwnModel):
    """A provider whose tokens of an image attend to later ones, as Gemma 3 with vision."""

    is_vision_language = True


def refusals(plan: Path) -> dict[str, str]:
    """Return the errors of jobs that do not fit a plan, by what is wrong."""
    from megatron_hexi.errors import HexiError
    from megatron_hexi.megatron.bridge_job import hold_configuration, take_options

    told = {}
    for wrong, section, field, value in (
        ("grid", "dist", "use_decentralized_pg", True),
        ("length", "model", "seq_length", 100),
        ("context", "model", "context_parallel_size", 2),
        ("dropout", "model", "hidden_dropout", 0.1),
        ("validation", "validation", "eval_global_batch_size", 8),
        ("loader", "dataset", "dataloader_type", "external"),
        ("epochs", "train", "num_epochs", 2),
        ("own", "model", "__class__", OwnModel),
        ("image", "model", "__class__", ImageModel),
        ("dealt", "model", "vision_dp_when_cp", True),
        ("apart", "model", "dist_train", SimpleNamespace(use_dist_train=True)),
        ("export", "checkpoint", "also_save_hf_checkpoint", True),
        ("ranks", "train", "micro_batch_size", 1),
    ):
        config = configuration()
        setattr(getattr(config, section), field, value)
        try:
            hold_configuration(config, take_options(["--hexi-plan", str(plan)]), torch.device("cpu"))
        except HexiError as problem:
            told[wrong] = str(problem)
    for wrong, words in (("record", ["--hexi-record", "x"]), ("kernel", ["--hexi-kernel", "fast"])):
        try:
            options = take_options(["--hexi-plan", str(plan), *words])
            hold_configuration(configuration(), options, torch.device("cpu"))
        except HexiError as problem:
            told[wrong] = str(problem)
    return told


def alone(out: Path) -> None:
    if (out / "saved-by-plan").is_dir():
        results = [Results(out, "back")]
        pretrain(loading(out / "saved-by-plan"), forward_step, callbacks=results)
        results = [Results(out, "stages-back")]
        pretrain(loading(out / "saved-by-stages", **SHARED), forward_step, callbacks=results)
        return
    pretrain(configuration(), forward_step, callbacks=[Results(out, "alone")])
    pretrain(saving(out / "saved-alone"), forward_step)
    told = refusals(out / "one-stage.yaml")
    (out / "refusals.json").write_text(json.dumps(told))


def under_plans(out: Path) -> None:
    from megatron_hexi import bridge
    from megatron_hexi.megatron import bridge_job

    pretrain(configuration(), forward_step, callbacks=[Results(out, "one-stage")])
    bridge_job.given_options().hexi_plan = None

    def train(name: str, config: ConfigContainer, result: str | None = None) -> None:
        plan = out / f"{name}.yaml"
        bridge.pretrain(config, forward_step, plan=plan, callbacks=[Results(out, result or name)])

    train("replicas", configuration(**SHARED))
    pipeline = configuration()
    pipeline.model.pipeline_model_parallel_size = 2
    train("pipeline", pipeline)
    train("stages", configuration(**SHARED))
    train("replicas", loading(out / "saved-alone"), "there")
    train("replicas", saving(out / "saved-by-plan"), "saving")
    train("ministages", loading(out / "saved-alone"), "stages-there")
    train("stages", saving(out / "saved-by-stages", **SHARED), "saving")
    train("ministages", loading(out / "saved-by-stages", **SHARED), "stages-on")
    sampler = samplers.MegatronPretrainingSampler
    sampler.__iter__ = sampler.__iter__.__wrapped__  # each replica begins with the first micro-batch
    train("replicas", configuration(1), "fault")


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])  # our options are taken out
    dist.init_process_group("gloo")
    if dist.get_world_size() == 1:
        alone(folder)
    else:
        under_plans(folder)
