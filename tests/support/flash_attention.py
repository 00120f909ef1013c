"""The packages flash_attn and flash_attn_interface, played by functions with their signatures.

They compute with the plain kernel, on fake tensors too.
"""

import functools
from typing import Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_hexi.runtime.kernels import MathKernel
from megatron_hexi.runtime.kernels.base import Mode, Sequences, by_heads, by_rows

MATH = MathKernel()


def swap(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def sequences_of(ends_q, ends_k, q, k, most_q, most_k):
    """Lengths of sequences; on fake tensors, whose ends cannot be read, one of all rows."""
    lengths = [
        [rows] if isinstance(ends, FakeTensor) else ends.diff().tolist()
        for ends, rows in ((ends_q, q.shape[0]), (ends_k, k.shape[0]))
    ]
    if not isinstance(ends_q, FakeTensor):
        assert [max(some) for some in lengths] == [most_q, most_k]
    return Sequences(tuple(lengths[0]), tuple(lengths[1]), ends_q, ends_k)


def varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    mode = Mode(causal, softmax_scale, sequences)
    query, key, value = (by_heads(tensor, mode) for tensor in (q, k, v))
    output, log_sum_exp = MATH.forward(query, key, value, mode)
    return by_rows(output, mode).contiguous(), log_sum_exp[0].clone()


def varlen_backward(
    dout, q, k, v, out, lse, dq, dk, dv, ends_q, ends_k, most_q, most_k, softmax_scale, causal
):
    mode = Mode(causal, softmax_scale, sequences_of(ends_q, ends_k, q, k, most_q, most_k))
    dout, q, k, v, out = (by_heads(tensor, mode) for tensor in (dout, q, k, v, out))
    grads = MATH.backward(dout, q, k, v, out, lse[None], mode)
    for target, gradient in zip((dq, dk, dv), grads, strict=True):
        target.copy_(by_rows(gradient, mode))


def forward_of_flash_attention(q, k, v, softmax_scale, causal):
    query, key, value = swap(q, k, v)
    output, log_sum_exp = MATH.forward(query, key, value, Mode(causal, softmax_scale))
    return swap(output)[0].contiguous(), log_sum_exp


def backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal):
    dout, q, k, v, out = swap(dout, q, k, v, out)
    grads = MATH.backward(dout, q, k, v, out, softmax_lse, Mode(causal, softmax_scale))
    for target, gradient in zip((dq, dk, dv), grads, strict=True):
        target.copy_(gradient.transpose(1, 2))


@functools.cache  # torch keeps an operator of a name
def flash_attention_2_8():
    """flash_attn 2.7 to 2.8: torch operators, parameters without defaults."""

    @torch.library.custom_op("hexi_test_fa2::_flash_attn_forward", mutates_args=())
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Optional[torch.Tensor],  # noqa: UP045 (as there)
        return_softmax: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        assert alibi_slopes is None
        assert not return_softmax
        return *forward_of_flash_attention(q, k, v, softmax_scale, causal), q.new_empty(0), q.new_empty(2)

    forward.register_fake(forward._init_fn)

    @torch.library.custom_op("hexi_test_fa2::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: Optional[torch.Tensor],  # noqa: UP045
        dk: Optional[torch.Tensor],  # noqa: UP045
        dv: Optional[torch.Tensor],  # noqa: UP045
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Optional[torch.Tensor],  # noqa: UP045
        deterministic: bool,
        rng_state: Optional[torch.Tensor] = None,  # noqa: UP045
    ) -> torch.Tensor:
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return softmax_lse.clone()

    @torch.library.custom_op("hexi_test_fa2::_flash_attn_varlen_forward", mutates_args=())
    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Optional[torch.Tensor] = None,  # noqa: UP045
        return_softmax: bool = False,
        block_table: Optional[torch.Tensor] = None,  # noqa: UP045
        leftpad_k: Optional[torch.Tensor] = None,  # noqa: UP045
        seqused_k: Optional[torch.Tensor] = None,  # noqa: UP045
        zero_tensors: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        most = max_seqlen_q, max_seqlen_k
        found = varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *most, softmax_scale, causal)
        return *found, q.new_empty(0), q.new_empty(2)

    varlen.register_fake(varlen._init_fn)

    @torch.library.custom_op("hexi_test_fa2::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
    def varlen_back(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: Optional[torch.Tensor],  # noqa: UP045
        dk: Optional[torch.Tensor],  # noqa: UP045
        dv: Optional[torch.Tensor],  # noqa: UP045
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Optional[torch.Tensor],  # noqa: UP045
        deterministic: bool,
        rng_state: Optional[torch.Tensor] = None,  # noqa: UP045
        zero_tensors: bool = False,
    ) -> torch.Tensor:
        most = max_seqlen_q, max_seqlen_k
        ends = cu_seqlens_q, cu_seqlens_k, *most
        varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *ends, softmax_scale, causal)
        return softmax_lse.clone()

    varlen_back.register_fake(varlen_back._init_fn)
    backward.register_fake(backward._init_fn)
    return forward, backward, varlen, varlen_back


def flash_attention_3_beta():
    """flash_attn_interface as of flash-attn 2.8: plain functions."""

    def forward(
        q,
        k,
        v,
        k_new,
        v_new,
        qv,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_batch_idx,
        leftpad_k,
        rotary_cos,
        rotary_sin,
        seqlens_rotary,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        unused = (k_new, v_new, qv, out, seqused_k, page_table, rotary_cos, v_descale)
        assert unused == (None,) * len(unused)
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return *varlen_forward(q, k, v, *ends, softmax_scale, causal), None, None
        return *forward_of_flash_attention(q, k, v, softmax_scale, causal), None, None

    def backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        assert sequed_k is None
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *ends, softmax_scale, causal)
            return dq, dk, dv, softmax_lse
        backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return dq, dk, dv, softmax_lse

    return forward, backward


@functools.cache
def flash_attention_3_later():
    """flash_attn_interface of later: a torch operator, `is_causal` in the backward.

    https://github.com/Dao-AILab/flash-attention/blob/01afd16/hopper/flash_attn_interface.py
    """
    forward, _ = flash_attention_3_beta()

    @torch.library.custom_op("hexi_test_fa3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        cu_seqlens_q: Optional[torch.Tensor] = None,  # noqa: UP045
        dq: Optional[torch.Tensor] = None,  # noqa: UP045
        dk: Optional[torch.Tensor] = None,  # noqa: UP045
        dv: Optional[torch.Tensor] = None,  # noqa: UP045
        softmax_scale: Optional[float] = None,  # noqa: UP045
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> torch.Tensor:
        backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal)
        return softmax_lse.clone()

    return forward, backward
