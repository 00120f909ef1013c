"""Multi-latent attention written out, for ``--spec tests.megatron.latent_spec spec``.

``normed`` in place of ``spec`` is for jobs with --qk-layernorm, ``transformer_engine`` for such ones with its
layers.

Megatron's own attention takes no values of another size than keys. This one is written out: no blocks, no
log-sum-exps, the whole matrix of scores. What plans are held against.
"""

from __future__ import annotations

import copy
import math

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention


class WrittenOut(torch.nn.Module):
    """softmax(Q K^T scale) V, with Megatron's windows and sinks."""

    def __init__(self, config, layer_number, softmax_scale, k_channels=None, v_channels=None, **others):
        super().__init__()
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else math.inf
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            config.init_method(self.softmax_offset)

    def forward(self, query, key, value, attention_mask, **others):
        """[S, B, H, Dk], [S, B, H, Dk] and [S, B, H, Dv] to [S, B, H Dv]."""
        scores = torch.einsum("qbhd,sbhd->bhqs", query, key) * self.scale
        behind = torch.arange(query.shape[0])[:, None] - torch.arange(key.shape[0])
        scores = scores.masked_fill((behind < 0) | (behind > self.window), -math.inf)
        if hasattr(self, "softmax_offset"):
            column = self.softmax_offset[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], dim=3)
        weights = scores.softmax(dim=3)[..., : key.shape[0]]
        return torch.einsum("bhqs,sbhd->qbhd", weights, value).flatten(2)


def _written_out(spec: ModuleSpec) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = WrittenOut
    return spec


spec, normed = (
    _written_out(
        get_gpt_layer_local_spec(
            multi_latent_attention=True, qk_layernorm=qk_layernorm, normalization="RMSNorm"
        )
    )
    for qk_layernorm in (False, True)
)
if HAVE_TE:
    transformer_engine = _written_out(
        get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    )
