"""The encoder of images of a model, from the ``vision_config`` of a config.json."""

from __future__ import annotations

from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.models.hugging_face.config import Config
from megatron_hexi.models.vision import Vision


def vision_of(config: Config, hidden_size: int) -> Vision | None:
    """Return the encoder of a model's images; ``None``: the model has none, or none that is read.

    Args:
        hidden_size: width of the decoder.

    Raises:
        HexiError: a field is not usable, or the encoder's features are not as wide as the decoder.
    """
    own = config.encoder
    if own is None:
        return None
    features = "out_hidden_size" if own.has("out_hidden_size") else "hidden_size"
    if own.size(features) != hidden_size:
        own.refuse(features, own.get(features), f"write {hidden_size}", "differs from the decoder's width")
    layers, patch = own.size("depth"), own.size("patch_size")
    fields: dict[str, Any] = {
        "layers": layers,
        "heads": own.size("num_heads"),
        "patch_values": own.size("in_channels") * own.size("temporal_patch_size") * patch**2,
        "merge": own.size("spatial_merge_size"),
    }
    if own.has("embed_dim"):
        width = own.size("embed_dim")
        fields |= {"hidden_size": width, "ffn_hidden_size": own.size("mlp_ratio") * width}
    else:
        fields |= {"hidden_size": own.size("hidden_size"), "ffn_hidden_size": own.size("intermediate_size")}
    if own.has("window_size"):
        side = fields["merge"] * (own.size("window_size") // fields["merge"] // patch)
        full = len(_layers(own, "fullatt_block_indexes", layers))
        fields |= {"gated": True, "norm_biases": False, "window": side**2, "full_layers": full}
    if own.has("num_position_embeddings"):
        further = len(_layers(own, "deepstack_visual_indexes", layers))
        positions = own.size("num_position_embeddings")
        fields |= {"patch_bias": True, "positions": positions, "deepstack": further}
    try:
        return Vision(**fields)
    except HexiError as problem:
        raise HexiError(f"{own.path}: {problem}") from None


def _layers(own: Config, field: str, layers: int) -> list[int]:
    """Return the value of a field that is a list of layers of the encoder, counted from 0."""
    value = own.get(field)
    if not isinstance(value, list | tuple) or any(type(i) is not int or not 0 <= i < layers for i in value):
        own.refuse(field, value, f"write a list of layers from 0 to {layers - 1}")
    return list(value)
