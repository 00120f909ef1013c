"""Megatron Bridge's configuration as the job of a plan."""

from __future__ import annotations

import dataclasses
import functools
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, Final

import torch

from megatron_hexi.elastic.store import in_round
from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.arguments import add_hexi_arguments, order_communication
from megatron_hexi.megatron.bridge_vision import has_vision, refuse_vision
from megatron_hexi.megatron.loop_job import HeldJob, LoopJob, hold_loop
from megatron_hexi.megatron.plan_arguments import refuse_without_plan
from megatron_hexi.options.kinds import DRAWS
from megatron_hexi.platform.select import say

#: Adapters that are whole on each rank of a domain, as the weights beside them.
_ADAPTERS: Final = ("LoRA", "DoRA", "CanonicalLoRA")
#: Layers of which experts have their own.
_OF_EXPERTS: Final = ("linear_fc1", "linear_fc1_up", "linear_fc1_gate", "linear_fc2")
_ADAPTER_SETTINGS: Final = (
    ("dropout", 0.0, f"{DRAWS}; give 0"),
    ("a2a_experimental", False, "it exchanges equal parts of a sequence; give False"),
)
#: Options of ours that choose how this process starts, not how a plan is carried out.
_OF_THE_START: Final = ("hexi_plan", "hexi_platform")
#: Sections that are not asked: the model is given apart, and Bridge states both ends of a constant weight
#: decay, which Megatron-LM refuses.
_APART: Final = ("model", "scheduler")
#: Settings that no argument of Megatron has, with the value under a plan and a reason.
_REFUSED: Final = (
    ("dist.use_decentralized_pg", False, "its groups are not those of the plan"),
    ("dist.eval_context_parallel_size", None, "the plan divides validation's sequences too"),
    ("dist.lazy_mpu_init", False, "a plan's groups are made at once"),
    ("inprocess_restart.enabled", False, "a restart makes groups anew"),
    ("train.num_epochs", None, "a plan's batches are counted in iterations"),
    ("checkpoint.also_save_hf_checkpoint", False, "its export gathers weights by Bridge's groups"),
    ("checkpoint.custom_manager_class", None, "its files may depend on Bridge's groups"),
    ("model.vision_dp_when_cp", False, "a plan divides images, by patches of its units"),
    ("model.dist_train.use_dist_train", False, "a plan divides images, by patches of its units"),
    ("tensor_inspect.enabled", False, "it looks at layers that a plan replaces"),
)


def take_options(words: list[str]) -> Namespace:
    """Take our options out of a command line, which is the script's own else.

    Args:
        words: the command line behind the script's name; changed in place.

    Raises:
        HexiError: an option of ours has no value, or none that is allowed.
    """
    parser = add_hexi_arguments(ArgumentParser(add_help=False, allow_abbrev=False))

    def refuse(message: str) -> None:
        raise HexiError(f"{message}; correct it")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    options, words[:] = parser.parse_known_args(words)
    return options


def hold_configuration(config: Any, options: Namespace, device: torch.device) -> HeldJob:
    """Check a `ConfigContainer` against its plan.

    Args:
        config: the configuration, with the mixed precision and the overlap of communication that it names.

    Raises:
        HexiError: the plan was made for another job, or does not support a setting.
    """
    if in_round():
        raise HexiError("megatron_hexi.elastic: needs Megatron-LM's loop; start with torchrun")
    _refuse_settings(config)
    usual = add_hexi_arguments(ArgumentParser(add_help=False)).parse_args([])
    arguments = {
        name: value
        for name, value in vars(options).items()
        if name not in _OF_THE_START and value != getattr(usual, name)
    }
    length, specs = config.model.seq_length, getattr(config.dataset, "offline_packing_specs", None)
    sequences, batch = config.train.micro_batch_size, config.train.global_batch_size
    if specs is not None:
        length, arguments["dataloader_inter_document_masking"] = specs.packed_sequence_size, True
    elif getattr(config.dataset, "enable_in_batch_packing", False):  # a micro-batch becomes one sequence
        length, batch, sequences = length * sequences, batch // sequences, 1
        arguments["dataloader_inter_document_masking"] = True
    sections = [getattr(config, one.name) for one in dataclasses.fields(config) if one.name not in _APART]
    job = LoopJob(
        config.model,
        length,
        sequences,
        batch,
        arguments,
        [section for section in sections if dataclasses.is_dataclass(section)],
        None if config.peft is None else config.peft.dim,
        images=has_vision(config.model),
    )
    held = hold_loop(options.hexi_plan, job, device, stages=True)
    if has_vision(config.model):
        refuse_vision(config)
    order_communication(held.args)
    for line in held.replaced:
        say(f"replaced by the plan: {line}")
    return held


def _refuse_settings(config: Any) -> None:
    """Refuse settings that a plan does not support and that Megatron's own loop does not have.

    Raises:
        HexiError: the configuration has one.
    """
    from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetConfig
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training.config import GPTDatasetConfig

    for place, allowed, reason in _REFUSED:
        value = functools.reduce(lambda held, part: getattr(held, part, None), place.split("."), config)
        if value not in (None, allowed):
            raise HexiError(f"{place} {value}: {reason}; leave {place} out, or train without --hexi-plan")
    sees, name = has_vision(config.model), type(config.model).__name__
    if getattr(config.model, "is_vision_language", False):
        raise HexiError(
            f"model {name}: its tokens of an image attend to later ones of it, which a plan's attention does "
            "not do; train without --hexi-plan"
        )
    is_gpt = isinstance(config.model, GPTModelProvider)
    if is_gpt and not sees and type(config.model).provide is not GPTModelProvider.provide:
        raise HexiError(
            f"model {name}: builds a model of its own, and a plan carries out that of GPTModelProvider and "
            "of Qwen25VL-, Qwen3VL- and Qwen3VLMoEModelProvider; give a provider that leaves provide() as it "
            "is, or train without --hexi-plan"
        )
    texts = (GPTDatasetConfig, GPTSFTDatasetConfig)
    datasets = (DirectHFSFTDatasetConfig, MockVLMSFTDatasetConfig) if sees else texts
    for section, known in (("model", (GPTModelProvider,)), ("dataset", datasets)):
        value = getattr(config, section)
        if not isinstance(value, known):
            names = " or ".join(kind.__name__ for kind in known)
            raise HexiError(
                f"{section} {type(value).__name__}: a plan needs a {names} here; give one, or train without "
                "--hexi-plan"
            )
    refuse_adapters(config.peft, config.model)
    if config.dataset.dataloader_type not in (None, "single", "cyclic", "batch"):
        raise HexiError(
            f"dataset.dataloader_type {config.dataset.dataloader_type}: its batches are not shared out by a "
            "plan; give single, cyclic or batch"
        )
    for name in ("micro_batch_size", "global_batch_size"):
        value, trained = getattr(config.validation, f"eval_{name}"), getattr(config.train, name)
        if value not in (None, trained):
            raise HexiError(
                f"validation.eval_{name} {value}: the replicas of a plan share out batches of train.{name} "
                f"{trained}; leave validation.eval_{name} out"
            )


def given_options() -> Namespace:
    """Return our options of this process, which are taken out of its command line the first time."""
    global _options
    if _options is None:
        words = sys.argv[1:]
        _options = take_options(words)
        sys.argv[1:] = words
        if _options.hexi_plan is None:
            refuse_without_plan(_options)
    return _options


_options: Namespace | None = None


def refuse_adapters(peft: Any, model: Any) -> None:
    """Refuse adapters that do not train under a plan.

    Args:
        peft: Bridge's configuration of adapters; ``None``: all weights are trained.
        model: the model's configuration.

    Raises:
        HexiError: a setting is not supported; the message has its value and a remedy.
    """
    if peft is None:
        return
    kind = type(peft).__name__
    if kind not in _ADAPTERS:
        raise HexiError(f"peft {kind}: a plan trains {', '.join(_ADAPTERS)}; give one of them")
    for name, allowed, remedy in _ADAPTER_SETTINGS:
        value = getattr(peft, name, allowed)
        if value != allowed:
            raise HexiError(f"peft.{name} {value}: {remedy}")
    targets = [name for name in peft.target_modules or ("*",) if name.endswith(("*", *_OF_EXPERTS))]
    if model.num_moe_experts is not None and targets:
        raise HexiError(
            f"peft.target_modules {targets[0]}: experts hold this layer, whose adapters do not train under a "
            "plan yet; give target_modules=['linear_qkv', 'linear_proj']"
        )
