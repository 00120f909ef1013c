"""The parts of weights that this rank's parameters hold, read from Megatron's own checkpoint format.

A module's ``sharded_state_dict`` maps each parameter to boxes of global weights: layers along one axis, rows
of a tensor-parallel rank, both halves of a gated projection, the padded vocabulary, tied embeddings.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import Box
from megatron_hexi.runtime.bucket_buffer import HeldBox


def held_boxes(module: torch.nn.Module) -> list[HeldBox]:
    """Return the boxes of all trained parameters: the part of the whole weight that each of them holds.

    Raises:
        PlanError: a parameter is missing, in whole or in part, in Megatron's ``sharded_state_dict``.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    by_storage = {
        parameter.untyped_storage().data_ptr(): (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    depth_of = depths(module)
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    boxes: list[HeldBox] = []
    elements: dict[str, int] = dict.fromkeys((name for name, _ in by_storage.values()), 0)
    describe: Any = module.sharded_state_dict
    for leaf in nested_values(describe(metadata=metadata)):
        built = nested_values([leaf.build()]) if isinstance(leaf, ShardedTensorFactory) else [leaf]
        for tensor in built:
            if not isinstance(tensor, ShardedTensor) or tensor.data is None:
                continue
            match = by_storage.get(tensor.data.untyped_storage().data_ptr())
            if match is None:
                continue
            name, parameter = match
            shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
            cell = tuple(
                (start, start + size) for start, size in zip(tensor.global_offset, shape, strict=True)
            )
            strides = (0,) * tensor.prepend_axis_num + tuple(tensor.data.stride())
            offset = tensor.data.storage_offset() - parameter.storage_offset()
            box = Box(tensor.key, cell, tuple(tensor.global_shape), depth_of.get(parameter, 0))
            boxes.append(HeldBox(box, parameter, strides, offset))
            elements[name] += tensor.data.numel()
    for name, parameter in by_storage.values():
        if elements[name] != parameter.numel():
            raise PlanError(
                f"parameter {name}: {elements[name]} of its {parameter.numel()} elements are in Megatron's "
                "sharded_state_dict, so a plan with stages cannot tell who else holds them; train without it"
            )
    return boxes


def depths(module: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
    """Return when the forward pass uses parameters: 0 before the layers, then the layer's number.

    Heads that predict further tokens come behind all layers, though Megatron numbers them from 1 again.
    Parameters of an encoder of images, which come before the decoder's layers, are left out.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    decoder = next((part for part in module.modules() if isinstance(part, LanguageModule)), module)
    layers = {
        f"{name}.": layer.layer_number
        for name, layer in decoder.named_modules()
        if isinstance(getattr(layer, "layer_number", None), int)
        and name.rpartition(".")[2].isdigit()
        and ".mtp." not in f".{name}"
    }
    behind = max(layers.values(), default=0) + 1
    found: dict[torch.nn.Parameter, int] = {}
    seen_layers = False
    for name, parameter in decoder.named_parameters():
        layer = next((number for prefix, number in layers.items() if name.startswith(prefix)), None)
        seen_layers = seen_layers or layer is not None
        outside = behind if seen_layers or "embedding" not in name else 0
        found[parameter] = outside if layer is None else layer
    return found
