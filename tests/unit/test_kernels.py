"""Every kernel against attention written out with einsum and differentiated by autograd, in fp64."""

import math
import sys
import types
from typing import Optional

import pytest
import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.plan import Block, Shape
from megatron_hexi.plan.heads import head_spans, kv_range, spans_in_two
from megatron_hexi.runtime import KERNEL_NAMES, select_kernel
from megatron_hexi.runtime import blocks as block_attention
from megatron_hexi.runtime.blocks import BlockAttention, Merger
from megatron_hexi.runtime.kernels import KERNELS, MathKernel
from megatron_hexi.runtime.kernels import flash_attn as flash_attn_adapter
from megatron_hexi.runtime.kernels.flash_attn import FlashAttentionKernel

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
ON_CPU = ["aten-cpu", "math"]
ON_CUDA = ["flash-attn-3", "cudnn", "flash-attn-2", "aten-flash"]

# Query heads, KV heads, queries, keys, causal.
SHAPES = {
    "MHA": (3, 3, 16, 16, False),
    "GQA": (8, 2, 16, 24, False),
    "MQA": (4, 1, 24, 16, False),
    "one token": (2, 1, 1, 1, True),
    "one query": (4, 2, 1, 37, False),
    "one key": (4, 2, 37, 1, False),
    "odd": (6, 3, 33, 67, False),
    "odd causal": (6, 2, 129, 129, True),
    "even causal": (4, 4, 64, 64, True),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def attention(query, key, value, *, causal, scale):
    """Output and log-sum-exp of [B, H, Q, D] and [B, K, S, D], in the type given."""
    sharing = query.shape[1] // key.shape[1]
    scores = torch.einsum("bhqd,bhsd->bhqs", query, key.repeat_interleave(sharing, 1)) * scale
    if causal:
        future = torch.arange(key.shape[2]) > torch.arange(query.shape[2])[:, None]
        scores = scores.masked_fill(future.to(scores.device), -math.inf)
    output = torch.einsum("bhqs,bhsd->bhqd", scores.softmax(-1), value.repeat_interleave(sharing, 1))
    return output, scores.logsumexp(-1)


def inputs(shape, dtype, head_dim=16, device="cpu", batch=2):
    heads, kv_heads, queries, keys, _ = shape
    generator = torch.Generator().manual_seed(heads * 1000 + queries)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [
        torch.randn(batch, *size, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)
        for size in sizes
    ]


def truth(query, key, value, grad, *, causal, scale, dtype=torch.float64):
    """Output, log-sum-exp and three gradients, computed in a type; log-sum-exp first."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=causal, scale=scale)
    return [log_sum_exp.detach(), output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]


def results(kernel, query, key, value, grad, *, causal, scale):
    mode = {"causal": causal, "scale": scale}
    output, log_sum_exp = kernel.forward(query, key, value, **mode)
    grads = kernel.backward(grad, query, key, value, output, log_sum_exp, **mode)
    assert [tensor.shape for tensor in (output, *grads)] == [t.shape for t in (query, query, key, value)]
    assert {tensor.dtype for tensor in (output, *grads)} == {query.dtype}
    assert log_sum_exp.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    return [log_sum_exp, output, *grads]


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


def assert_close(found, expected, tolerance):
    for result, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(result.double(), exact.double(), atol=tolerance, rtol=tolerance)


def assert_as_precise_as_plain(found, tensors, *, causal, scale):
    """Each error at most twice that of plain attention in the same type."""
    exact = truth(*tensors, causal=causal, scale=scale)
    plain = truth(*tensors, causal=causal, scale=scale, dtype=tensors[0].dtype)
    # With one key plain attention is exact and some gradients are 0: what is left is to round to the type.
    rounding = torch.finfo(tensors[0].dtype).eps / 2 * max(rms(right) for right in exact)
    for number, (result, rough, right) in enumerate(zip(found, plain, exact, strict=True)):
        least = rounding if tensors[1].shape[2] == 1 else 0
        assert rms(result - right) <= max(2 * rms(rough - right), least), number


@shapes
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_block_is_attention_and_its_gradients(name, dtype, tolerance, shape):
    tensors, mode = inputs(shape, dtype), {"causal": shape[-1], "scale": 0.3}
    assert_close(results(BY_NAME[name], *tensors, **mode), truth(*tensors, **mode), tolerance)


@shapes
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_at_most_twice_as_far_from_the_truth_as_plain_attention(name, dtype, shape):
    tensors, mode = inputs(shape, dtype), {"causal": shape[-1], "scale": 0.25}
    assert_as_precise_as_plain(results(BY_NAME[name], *tensors, **mode), tensors, **mode)


@pytest.mark.parametrize("name", ON_CPU)
def test_inputs_may_be_views_of_what_travelled(name):
    """Heads of one message, tokens first; as the all-to-all leaves them."""
    shape = (4, 2, 19, 19, True)
    tensors, mode = inputs(shape, torch.float64), {"causal": True, "scale": 0.4}
    message = torch.cat([tensor.permute(2, 0, 1, 3).flatten(2) for tensor in tensors], dim=2)
    widths = [tensor.shape[1] * tensor.shape[3] for tensor in tensors]
    views = [columns.unflatten(2, (-1, 16)).permute(1, 2, 0, 3) for columns in message.split(widths, dim=2)]
    assert not any(view.is_contiguous() for view in views)
    assert_close(results(BY_NAME[name], *views, **mode), truth(*tensors, **mode), 1e-12)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("extreme", [1e-3, 30.0])
def test_blocks_that_are_merged_are_one_attention_forward_and_backward(name, extreme):
    """Queries 20 to 31 of a causal sequence: their own block, then two rectangles."""
    kernel, scale = BY_NAME[name], 0.5
    query, key, value, grad = inputs((6, 2, 32, 32, True), torch.float64)
    query = query * extreme  # blocks of very different weight
    own, earlier = slice(20, 32), (slice(0, 7), slice(7, 20))
    rows = query[:, :, own]
    merger = Merger(*kernel.forward(rows, key[:, :, own], value[:, :, own], causal=True, scale=scale))
    for keys in earlier:
        merger.add(
            (0, rows.shape[1]),
            (0, 12),
            *kernel.forward(rows, key[:, :, keys], value[:, :, keys], causal=False, scale=scale),
        )
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=True, scale=scale)
    expected = torch.autograd.grad(output[:, :, own], leaves, grad[:, :, own])
    assert_close([merger.output, merger.log_sum_exp], [output[:, :, own], log_sum_exp[:, :, own]], 1e-11)

    totals = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for keys in (own, *earlier):
        part = kernel.backward(
            grad[:, :, own],
            rows,
            key[:, :, keys],
            value[:, :, keys],
            merger.output,
            merger.log_sum_exp,
            causal=keys is own,
            scale=scale,
        )
        for total, where, gradient in zip(totals, (own, keys, keys), part, strict=True):
            total[:, :, where] += gradient
    assert_close(totals, expected, 1e-10)


def test_a_block_on_some_rows_leaves_the_others_as_they_were():
    kernel = MathKernel()
    query, key, value, _ = inputs((2, 2, 8, 8, False), torch.float32)
    merger = Merger(*kernel.forward(query, key, value, causal=False, scale=1.0))
    before = merger.output.clone()
    merger.add(
        (0, query.shape[1]),
        (3, 5),
        *kernel.forward(query[:, :, 3:5], key + 1, value + 1, causal=False, scale=1.0),
    )
    changed = (merger.output != before).any(dim=(0, 1, 3))
    assert changed.tolist() == [False, False, False, True, True, False, False, False]


@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize("size", [5, 60])
def test_blocks_of_one_size_are_one_call_if_they_are_small(shape, size, monkeypatch):
    """Three blocks of a sequence: their results are those of each alone."""
    query, key, value, grad = inputs((4, 2, 3 * size, 3 * size, False), torch.float64, batch=2)
    starts = (0, size), (2 * size, 0), (size, size)
    blocks = [Block((q, q + size), (k, k + size), shape) for q, k in starts]
    monkeypatch.setattr(block_attention, "BUSY_ROWS", 4 * 60)  # of four heads
    calls: list[dict] = []
    kernel = MathKernel()
    monkeypatch.setattr(MathKernel, "forward", log_calls(MathKernel.forward, calls))
    together = BlockAttention(kernel, head_spans((0, 4), 2), 0.3)
    found = {block: results for block, *results in together.forward(query, key, value, blocks)}
    assert len(calls) == (1 if size == 5 else 3)
    for block in blocks:
        rows, keys = slice(*block.queries), slice(*block.keys)
        q, g = query[:, :, rows], grad[:, :, rows]
        leaves = [tensor.clone().requires_grad_() for tensor in (q, key[:, :, keys], value[:, :, keys])]
        seen = {Shape.FULL: lambda s: s, Shape.CAUSAL: torch.tril, Shape.WINDOW_EDGE: torch.triu}[shape]
        hidden = ~seen(torch.ones(size, size, dtype=torch.bool))
        wide = [leaf.repeat_interleave(2, 1) for leaf in leaves[1:]]
        scores = (leaves[0] @ wide[0].mT * 0.3).masked_fill(hidden, -math.inf)
        output = scores.softmax(-1) @ wide[1]
        assert_close(found[block], (output, scores.logsumexp(-1)), 1e-12)
        expected = torch.autograd.grad(output, leaves, g)
        whole = [torch.zeros_like(tensor) for tensor in (grad, grad, scores.new_zeros(2, 4, 3 * size))]
        whole[0][:, :, rows], whole[1][:, :, rows], whole[2][:, :, rows] = g, *found[block]
        sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        together.add_backward(sums, whole[0], query, key, value, whole[1], whole[2], [block])
        assert_close([sums[0][:, :, rows], *(total[:, :, keys] for total in sums[1:])], expected, 1e-11)


def log_calls(function, calls):
    def logged(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return logged


@pytest.mark.parametrize("heads", [(0, 8), (1, 8), (3, 9), (2, 6), (5, 6), (0, 12)])
def test_heads_may_be_cut_anywhere(heads):
    """A member's heads of a layer with 12 query heads over 3 KV heads: those of the whole layer."""
    scale, (first, last) = 0.5, kv_range(heads, 4)
    query, key, value, grad = inputs((12, 3, 9, 9, True), torch.float64)
    own, kv = slice(*heads), slice(first, last)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=True, scale=scale)
    grad_query, grad_key, grad_value = torch.autograd.grad(output[:, own], leaves, grad[:, own])
    own_block = Block((0, 9), (0, 9), Shape.CAUSAL)
    blocks = BlockAttention(BY_NAME["aten-cpu"], head_spans(heads, 4), scale)
    parts = query[:, own], key[:, kv], value[:, kv]
    ((_, *found),) = blocks.forward(*parts, [own_block])
    assert_close(found, (output[:, own], log_sum_exp[:, own]), 1e-12)
    expected = grad_query[:, own], grad_key[:, kv], grad_value[:, kv]
    # The same added up in two parts, onto what is there already.
    ones_query, ones_key, ones_value = (torch.ones_like(gradient) for gradient in expected)
    sums = ones_query, ones_key, ones_value
    for spans in spans_in_two(heads, 4):
        part = BlockAttention(BY_NAME["aten-cpu"], spans, scale)
        part.add_backward(sums, grad[:, own], *parts, found[0], found[1], [own_block])
    assert_close(sums, [1 + gradient for gradient in expected], 1e-12)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_cuda_kernels_are_at_most_twice_as_far_from_the_truth_as_plain_attention(name, dtype, head_dim):
    kernel = BY_NAME[name]
    refusal = kernel.refuses(torch.device("cuda"), dtype, head_dim)
    if refusal:
        pytest.skip(f"{name}: {refusal}")
    for shape in SHAPES.values():
        tensors, mode = inputs(shape, dtype, head_dim, "cuda"), {"causal": shape[-1], "scale": head_dim**-0.5}
        assert_as_precise_as_plain(results(kernel, *tensors, **mode), tensors, **mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_cuda_kernels_take_views_and_merged_blocks(name, dtype):
    """Tokens first, as the all-to-all leaves them; the backward of one block from two blocks merged."""
    kernel = BY_NAME[name]
    refusal = kernel.refuses(torch.device("cuda"), dtype, 128)
    if refusal:
        pytest.skip(f"{name}: {refusal}")
    tensors = [
        tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        for tensor in inputs((8, 2, 65, 130, False), dtype, 128, "cuda")
    ]
    query, key, value, grad = tensors
    mode = {"causal": False, "scale": 128**-0.5}
    halves = [(key[:, :, half], value[:, :, half]) for half in (slice(0, 57), slice(57, 130))]
    merger = Merger(*kernel.forward(query, *halves[0], **mode))
    merger.add((0, query.shape[1]), (0, 65), *kernel.forward(query, *halves[1], **mode))
    output = merger.output.to(dtype)
    parts = [kernel.backward(grad, query, *half, output, merger.log_sum_exp, **mode) for half in halves]
    grads = [
        parts[0][0].float() + parts[1][0].float(),
        torch.cat([part[1] for part in parts], dim=2),
        torch.cat([part[2] for part in parts], dim=2),
    ]
    assert_as_precise_as_plain([merger.log_sum_exp, output, *grads], tensors, **mode)


# The packages flash_attn and flash_attn_interface, played by modules with their functions' signatures.

MATH = MathKernel()


def swap(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def forward_of_flash_attention(q, k, v, softmax_scale, causal):
    output, log_sum_exp = MATH.forward(*swap(q, k, v), causal=causal, scale=softmax_scale)
    return swap(output)[0].contiguous(), log_sum_exp


def backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal):
    dout, q, k, v, out = swap(dout, q, k, v, out)
    grads = MATH.backward(dout, q, k, v, out, softmax_lse, causal=causal, scale=softmax_scale)
    for target, gradient in zip((dq, dk, dv), grads, strict=True):
        target.copy_(gradient.transpose(1, 2))


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
        backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return softmax_lse.clone()

    return forward, backward


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
        unused = (k_new, v_new, qv, out, cu_seqlens_q, seqused_k, page_table, rotary_cos, v_descale)
        assert unused == (None,) * len(unused)
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
        assert (cu_seqlens_q, sequed_k, max_seqlen_k) == (None, None, None)
        backward_of_flash_attention(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return dq, dk, dv, softmax_lse

    return forward, backward


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


def flash_attention_without_scale():
    """A release that does not exist: it calls the scale something else."""

    def forward(q, k, v, scale, causal):
        raise AssertionError("must not be called")

    return forward, forward


def installed(monkeypatch, functions):
    """A kernel over a module with these functions."""
    module = types.ModuleType("hexi_test_flash_attn")
    forward, backward = functions()
    vars(module).update(_flash_attn_forward=forward, _flash_attn_backward=backward)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flash_attn_adapter._named.cache_clear()
    return FlashAttentionKernel("fake", module.__name__, ((8, 0), (10, 0)))


@shapes
@pytest.mark.parametrize("release", [flash_attention_2_8, flash_attention_3_beta, flash_attention_3_later])
def test_releases_of_flash_attention_are_called_as_they_want_it(monkeypatch, release, shape):
    kernel = installed(monkeypatch, release)
    tensors, mode = inputs(shape, torch.float32), {"causal": shape[-1], "scale": 0.3}
    assert_close(results(kernel, *tensors, **mode), truth(*tensors, **mode), 2e-5)


def test_a_release_of_flash_attention_that_lacks_a_parameter_is_refused(monkeypatch):
    kernel = installed(monkeypatch, flash_attention_without_scale)
    with pytest.raises(
        PlatformError, match=r"_flash_attn_forward has no parameter softmax_scale; install another"
    ):
        kernel.forward(*inputs(SHAPES["MHA"], torch.float32)[:3], causal=True, scale=1.0)


# The choice among them.

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_auto_takes_the_kernel_of_torch(dtype):
    assert select_kernel("auto", CPU, dtype, 17).name == "aten-cpu"


@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_can_be_asked_for_by_name(name):
    assert select_kernel(name, CPU, torch.float32, 64).name == name


def test_flags_offer_auto_and_every_kernel():
    assert KERNEL_NAMES == ("auto", "flash-attn-3", "cudnn", "flash-attn-2", "aten-flash", "aten-cpu", "math")


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_cuda_kernel_refuses_the_cpu_and_says_what_would_do(name):
    with pytest.raises(PlatformError) as caught:
        select_kernel(name, CPU, torch.bfloat16, 64)
    assert str(caught.value) == (
        f"kernel {name}: it runs on CUDA, the tensors are on cpu; "
        "for torch.bfloat16 with heads of 64 on cpu use: aten-cpu, math"
    )


def test_an_unknown_kernel_is_refused_with_those_there_are():
    with pytest.raises(
        PlatformError, match=r"kernel flash: there is none of that name; .* use: aten-cpu, math"
    ):
        select_kernel("flash", CPU, torch.float32, 64)


def test_auto_refuses_where_nothing_will_do():
    with pytest.raises(PlatformError, match=r"torch\.int64 with heads of 64 on cpu use: none"):
        select_kernel("auto", CPU, torch.int64, 64)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of some capability and some packages, as far as the choice looks at it."""

    def pretend(capability, packages=()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(flash_attn_adapter, "find_spec", lambda name: name if name in packages else None)

    return pretend


BOTH = ("flash_attn", "flash_attn_interface")


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "chosen"),
    [
        ((9, 0), BOTH, torch.bfloat16, 128, "flash-attn-3"),
        ((9, 0), BOTH[:1], torch.bfloat16, 128, "cudnn"),
        ((9, 0), BOTH, torch.float16, 256, "flash-attn-3"),
        ((9, 0), BOTH[:1], torch.float16, 256, "flash-attn-2"),
        ((9, 0), (), torch.bfloat16, 192, "aten-flash"),
        ((10, 0), BOTH, torch.bfloat16, 128, "cudnn"),
        ((8, 0), BOTH, torch.bfloat16, 64, "cudnn"),
        ((8, 0), (), torch.bfloat16, 20, "math"),
        ((8, 0), BOTH, torch.bfloat16, 264, "math"),
        ((9, 0), BOTH, torch.float32, 128, "math"),
        ((7, 5), BOTH, torch.float16, 64, "math"),
    ],
)
def test_on_cuda_auto_takes_the_fastest_that_is_there(gpu, capability, packages, dtype, head_dim, chosen):
    gpu(capability, packages)
    assert select_kernel("auto", CUDA, dtype, head_dim).name == chosen


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "reason"),
    [
        ("flash-attn-3", (9, 0), torch.bfloat16, 64, "the package flash_attn_interface is not installed"),
        ("flash-attn-2", (8, 0), torch.bfloat16, 64, "the package flash_attn is not installed"),
        ("flash-attn-3", (8, 0), torch.bfloat16, 64, "compute capabilities from (9, 0) to below (10, 0)"),
        ("flash-attn-2", (7, 5), torch.bfloat16, 64, "compute capabilities from (8, 0)"),
        ("flash-attn-2", (9, 0), torch.bfloat16, 12, "head sizes up to 256 that 8 divides, not 12"),
        ("flash-attn-2", (9, 0), torch.float32, 64, "it takes bf16 and fp16, not torch.float32"),
        ("cudnn", (9, 0), torch.bfloat16, 136, "head sizes up to 128 that 8 divides, not 136"),
        ("cudnn", (7, 5), torch.bfloat16, 64, "it needs compute capability 8.0"),
        ("cudnn", (9, 0), torch.float32, 64, "it takes bf16 and fp16, not torch.float32"),
        ("aten-flash", (9, 0), torch.float64, 64, "it takes bf16 and fp16, not torch.float64"),
        ("aten-flash", (9, 0), torch.bfloat16, 257, "head sizes up to 256 that 8 divides, not 257"),
        ("aten-flash", (7, 5), torch.float16, 64, "it needs compute capability 8.0"),
        ("aten-cpu", (9, 0), torch.float32, 64, "it runs on the CPU, the tensors are on cuda"),
    ],
)
def test_a_kernel_says_why_it_refuses(gpu, name, capability, dtype, head_dim, reason):
    gpu(capability)
    assert reason in str(BY_NAME[name].refuses(CUDA, dtype, head_dim))
    with pytest.raises(PlatformError) as caught:
        select_kernel(name, CUDA, dtype, head_dim)
    assert f"kernel {name}: " in str(caught.value)
    assert reason in str(caught.value)
