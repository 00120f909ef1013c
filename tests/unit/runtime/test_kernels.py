"""Every kernel against attention written out with einsum and differentiated by autograd, in fp64."""

import pytest
import torch

from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.kernels import BlockKind, Mode
from megatron_hexi.runtime.sums import RowSum
from tests.support.compiled import carried_out
from tests.support.kernels import (
    BY_NAME,
    ON_CPU,
    ON_CUDA,
    SHAPES,
    assert_as_precise_as_plain,
    assert_close,
    inputs,
    results,
    shapes,
    truth,
)


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
        if kernel.takes(BlockKind(tensors[0].shape, tensors[1].shape, shape[-1], tensors[0].device)):
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
    mode = Mode(causal=False, scale=128**-0.5)
    halves = [(key[:, :, half], value[:, :, half]) for half in (slice(0, 57), slice(57, 130))]

    def merged(recorder, *terms):
        total = RowSum(recorder, tuple(query.shape), weighed=True)
        for term in zip(terms[::2], terms[1::2], strict=True):
            total.add((0, query.shape[1]), Rows((0, 65)), *term)
        return total.result()

    terms = (tensor for half in halves for tensor in kernel.forward(query, *half, mode))
    output, log_sum_exp = carried_out(merged, *terms)
    parts = [kernel.backward(grad, query, *half, output, log_sum_exp, mode) for half in halves]
    grads = [
        parts[0][0].float() + parts[1][0].float(),
        torch.cat([part[1] for part in parts], dim=2),
        torch.cat([part[2] for part in parts], dim=2),
    ]
    assert_as_precise_as_plain([log_sum_exp, output, *grads], tensors, causal=False, scale=mode.scale)
