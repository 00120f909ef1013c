"""A script that trains Megatron's LLaVAModel, as NVIDIA's pretrain_vlm.py does, on random images among texts.

Weights are filled by their names, and saved at the end beside the metrics.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.multimodal import context_parallel, llava_model
from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import get_args, get_tokenizer, pretrain, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

SIDE, PATCH = 12, 4
#: Tokens of an image: its patches and its class.
IMAGE = (SIDE // PATCH) ** 2 + 1
PLACE = llava_model.DEFAULT_IMAGE_TOKEN_INDEX
#: Without Transformer Engine, Megatron's default for these norms takes no configuration.
NORMS = dict.fromkeys(("ln_pre_impl", "ln_post_impl"), WrappedTorchNorm)
llava_model.CLIPViTModel = functools.partial(CLIPViTModel, **NORMS)
models: list[Any] = []


class Images(MockMultimodalDataset):
    """Texts with an image each, at a place of its own."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample, random = super().__getitem__(number), torch.Generator().manual_seed(number)
        text, place = sample["tokens"], number % len(sample["tokens"])
        tokens = torch.cat([text[:place], torch.tensor([PLACE]), text[place:]])
        return {
            "tokens": tokens,
            "labels": torch.cat([tokens[1:], sample["labels"][-1:]]),
            "loss_mask": (tokens != PLACE).float(),
            "position_ids": torch.arange(len(tokens)),
            "image": torch.randn(3, SIDE, SIDE, generator=random),
        }


def weights_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return a stage's weights by their names in the whole model."""
    found = {}
    for key, weight in model.named_parameters():
        if key.startswith("language_model.decoder.layers."):  # a stage counts its own layers from 0
            layer = model.get_submodule(".".join(key.split(".")[:4]))
            key = ".".join([*key.split(".")[:3], str(layer.layer_number - 1), *key.split(".")[4:]])
        found[key] = weight
    return found


def model_provider(**unused: Any) -> Any:
    args = get_args()
    config = core_transformer_config_from_args(args)
    length, args.seq_length = args.dataloader_seq_length + IMAGE, IMAGE
    parts = [copy.deepcopy(config) for _ in range(2)]
    for part in parts:
        part.context_parallel_size = part.pipeline_model_parallel_size = 1
    parts[0].num_layers, parts[0].vision_model_type = 2, "clip"
    spec, is_first = decoder_model_with_local_default_spec(), parallel_state.is_pipeline_first_stage()
    model = llava_model.LLaVAModel(
        config,
        spec,
        args.padded_vocab_size,
        length,
        parts[0],
        get_vit_layer_with_local_spec(),
        False,
        parts[1],
        copy.deepcopy(get_submodules(spec.submodules.mlp)),
        language_position_embedding_type=args.position_embedding_type,
        pre_process=is_first,
        post_process=parallel_state.is_pipeline_last_stage(),
        add_encoder=is_first,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.add_(torch.randn(weight.shape, generator=random) * 0.05 - weight * (weight.dim() > 1))
    models.append(model)
    return model


def datasets(samples: Any) -> Any:
    args = get_args()
    config = MultimodalDatasetConfig(
        random_seed=args.seed,
        split=args.split,
        sequence_length=args.dataloader_seq_length,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        image_h=SIDE,
        image_w=SIDE,
    )
    return BlendedMegatronDatasetBuilder(Images, samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> Any:
    loss, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> Any:
    args, batch = get_args(), next(batches)
    whole = tensor_parallel.broadcast_data(["tokens", "position_ids", "labels"], batch, torch.int64)
    whole |= tensor_parallel.broadcast_data(["image", "loss_mask"], batch, torch.float32)
    packed, size = None, args.context_parallel_size
    if size > 1:
        length = whole["tokens"].shape[1] + IMAGE - 1
        padding = context_parallel.get_padding(length, size, 1, False)
        packed = context_parallel.get_packed_seq_params(whole["tokens"], IMAGE - 1, padding, size)
    inputs = (whole[name] for name in ("image", "tokens", "position_ids"))
    output, mask = model(*inputs, None, whole["labels"], whole["loss_mask"], packed_seq_params=packed)
    return output, functools.partial(loss_of, mask)


def add_arguments(parser: Any) -> Any:
    parser.add_argument("--dataloader-seq-length", type=int)
    return parser


if __name__ == "__main__":
    models.clear()
    # The ranks of `Forks` ask how units of several ranks hold each weight, which are refused with an encoder.
    training.get_model = training.get_model.__wrapped__
    given = parse_and_validate_args(extra_args_provider=add_arguments)
    config = pretrain_cfg_container_from_args(given)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, model_provider)
    trained = {name: weight.detach().clone() for name, weight in weights_of(models[0]).items()}
    torch.save(trained, Path(f"weights-{dist.get_rank()}.pt"))
