"""Gated delta net layers under a plan: uneven tokens become uneven heads, and heads become tokens.

Megatron's layer divides all sizes by the number of context-parallel ranks. Here the sizes are those of this
rank's heads; the projections, norm, kernels and weights are the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_hexi.megatron.packing import document_ends
from megatron_hexi.megatron.session import Session, active_session, given_plan
from megatron_hexi.megatron.state_shares import ColumnSection, StateShare, unused
from megatron_hexi.patching import patched

_NUMBER = ColumnSection(1)


@patched(
    "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet.forward",
    only=">=0.19",  # before, these layers are refused beside a plan
    why="the plan says which heads of a delta net a rank scans, and in which order positions arrive",
    parameters=(
        *("self", "hidden_states", "attention_mask", "inference_context", "packed_seq_params"),
        *("sequence_len_offset", "inference_params", "kwargs"),
    ),
)
def _by_the_plan(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    sequence_len_offset: int | None = None,
    **kwargs: Any,
) -> Any:
    session = active_session()
    if session is None:
        args = (attention_mask, inference_context, packed_seq_params, sequence_len_offset)
        return original(self, hidden_states, *args, **kwargs)
    return _forward(self, session, hidden_states, packed_seq_params)


def _forward(layer: Any, session: Session, hidden: Tensor, packed: Any) -> tuple[Tensor, Tensor | None]:
    """Return the layer's output for this rank's rows, [L, B, hidden size], and its bias.

    `hidden` has the same shape; under sequence parallelism both have a part of the rows.
    """
    share = StateShare(session, layer.num_v_heads_local_tp, layer.num_k_heads_local_tp)
    key, value = _sections(layer)
    projected, _ = layer.in_proj(hidden)
    columns = [key, key, value, value, _NUMBER, _NUMBER]  # query, key, value, gate, beta, alpha
    arrived = share.exchange(columns, packed).to_columns(projected)
    if share.own[0] == share.own[1]:  # kernels take no tensors without heads
        weights = (*layer.conv1d.parameters(), layer.dt_bias, layer.A_log, *layer.out_norm.parameters())
        scanned = arrived + unused(weights).to(arrived.dtype)
    else:
        scanned = _scan(layer, share, arrived, packed)
    output, bias = layer.out_proj(share.exchange([value], packed).to_rows(scanned, share.rows(packed)))
    return output, bias


def _scan(layer: Any, share: StateShare, arrived: Tensor, packed: Any) -> Tensor:
    """Return the gated outputs of own heads for the whole sequence, [S, B, own channels].

    `arrived` has query, key, value, gate, beta and alpha of these heads, [S, B, columns].
    """
    key, value = _sections(layer)
    keys, values, heads = (stop - start for start, stop in share.ranges([key, value, _NUMBER]))
    ends = document_ends(packed)
    ends = None if ends is None else ends.flatten()
    columns, gate, beta, alpha = arrived.transpose(0, 1).split([2 * keys + values, values, heads, heads], -1)
    convolved = _convolve(layer, share, columns, ends)
    *shared, own_values = convolved.split([keys, keys, values], -1)
    first, stop = share.own
    groups = torch.arange(first, stop, device=arrived.device) // share.shared_by - first // share.shared_by
    query, own_keys = (_of_heads(layer, part, groups) for part in shared)
    decay, rate = layer._compute_g_and_beta(
        share.cut(layer.A_log, [_NUMBER]),
        share.cut(layer.dt_bias, [_NUMBER]),
        alpha.contiguous(),
        beta.contiguous(),
    )
    outputs, _ = layer.gated_delta_rule(
        query,
        own_keys,
        own_values.unflatten(-1, (heads, layer.value_head_dim)).contiguous(),
        g=decay,
        beta=rate,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=ends,
    )
    gate = gate.unflatten(-1, (heads, layer.value_head_dim)).contiguous()
    gated: Tensor = layer._apply_gated_norm(outputs, gate)
    return gated.view(*columns.shape[:2], values).transpose(0, 1).contiguous()


def _convolve(layer: Any, share: StateShare, columns: Tensor, ends: Tensor | None) -> Tensor:
    """Return the activated convolution of own queries, keys and values, [B, S, columns]."""
    key, value = _sections(layer)
    sections = [key, key, value]
    weight = share.cut(layer.conv1d.weight, sections)
    bias = None if layer.conv1d.bias is None else share.cut(layer.conv1d.bias, sections)
    if layer.config.deterministic_mode:  # the kernel's gradients differ from run to run
        length, taps = columns.shape[1], weight.shape[2]
        whole = functional.conv1d(
            columns.transpose(1, 2), weight, bias, padding=taps - 1, groups=weight.shape[0]
        )
        activated: Tensor = layer.act_fn(whole[..., :length])
        return activated.transpose(1, 2)
    from megatron.core.ssm.gated_delta_net.common import causal_conv1d  # since 0.19

    convolved: Tensor
    convolved, _ = causal_conv1d(
        x=columns.contiguous(),
        weight=weight.squeeze(1),
        bias=bias,
        activation=layer.activation,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=ends,
    )
    return convolved


def _of_heads(layer: Any, columns: Tensor, groups: Tensor) -> Tensor:
    """Return the query or key of each own head, [B, S, heads, key size].

    `columns` are of the groups that own heads read, [B, S, groups x key size], and `groups` is the group
    of each head, counted from the first of these.
    """
    of_groups = columns.unflatten(-1, (-1, layer.key_head_dim))
    if layer.use_qk_l2norm:
        from megatron.core.ssm.gated_delta_net.common import l2norm  # since 0.19

        of_groups = l2norm(of_groups.contiguous())
    return of_groups.index_select(2, groups)


def _sections(layer: Any) -> tuple[ColumnSection, ColumnSection]:
    """Return the columns of a key (or query), and of a value (or gate)."""
    return ColumnSection(layer.key_head_dim, is_shared=True), ColumnSection(layer.value_head_dim)


@patched(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    only=">=0.19",
    why="under a plan the ranks of a group need not divide the heads of a delta net",
)
def _with_any_heads(original: Callable[..., None], self: Any) -> None:
    size = self.context_parallel_size
    if given_plan() is not None and self.experimental_attention_variant == "gated_delta_net":
        self.context_parallel_size = 1
    try:
        original(self)
    finally:
        self.context_parallel_size = size


DELTA_NET_PATCHES = (
    _by_the_plan,
    _with_any_heads,
)
