"""CUDA tensors without a GPU: torch's fake tensors, which have shapes, strides and a device, and no contents.

What would wait for the device cannot be done with them, so that a hidden wait is an error.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hexi.plan import Schedules
from megatron_hexi.runtime import all_to_all, call_rows, exchange, fused
from megatron_hexi.runtime.attention import _DomainAttentionFunction
from megatron_hexi.runtime.fused import on_gpu
from megatron_hexi.runtime.kernels import flash_attn, ranked_kernels
from megatron_hexi.runtime.kernels.base import BlockKind, KernelDispatch, KernelOnOffer, Mode
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from megatron_hexi.runtime.wire import Transfers
from tests.support.flash_attention import flash_attention_2_8, flash_attention_3_beta

CUDA = torch.device("cuda:0")
HALF = (torch.bfloat16, torch.float16)

#: The packages of FlashAttention, by name, and what plays each.
_PACKAGES = {"flash_attn": flash_attention_2_8(), "flash_attn_interface": flash_attention_3_beta()}


class HostWait(AssertionError):
    """The host would wait for the device."""


class Operations(TorchDispatchMode):
    """Lets no tensor go from the device to the host or back, as fake tensors would; and notes what is called.

    Attributes:
        called: names of operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.called.add(func._overloadpacket.__name__)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise HostWait(f"{func} moves a tensor between host and device")
        return result


@contextlib.contextmanager
def gpu(capability: tuple[int, int], packages: tuple[str, ...] = (), cudnn: int = 92000) -> Iterator[None]:
    """A machine with a GPU of some capability, some packages and a cuDNN, as far as kernels look at it."""
    functions = {name.partition(".")[0]: pair for name, pair in _PACKAGES.items()}

    def module(name: str) -> SimpleNamespace:
        forward, backward, *varlen = functions[name.partition(".")[0]]
        made = SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
        if varlen:
            made._flash_attn_varlen_forward, made._flash_attn_varlen_backward = varlen
        return made

    flash_attn._named.cache_clear()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.backends.cudnn, "is_available", return_value=True),
        mock.patch.object(torch.backends.cudnn, "version", return_value=cudnn),
        mock.patch.object(flash_attn, "_is_installed", lambda name: name.partition(".")[0] in packages),
        mock.patch.object(flash_attn, "importlib", SimpleNamespace(import_module=module)),
    ):
        yield
    flash_attn._named.cache_clear()


def _uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """What is made on the host once for a schedule, on the device: a copy for which nobody waits."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def fake_tensors() -> Iterator[Operations]:
    """Tensors that are made inside are fake; moving one between host and device is a `HostWait`."""
    call_rows.call_rows.cache_clear()
    call_rows.rows_of.cache_clear()
    with (
        FakeTensorMode(),
        Operations() as operations,
        mock.patch.object(call_rows, "on_device", _uploaded),
        mock.patch.object(fused, "has_triton", return_value=True),
        mock.patch.object(on_gpu, "launch", _checked_launch),
    ):
        yield operations


def _checked_launch(
    kernel: str, grid: Any, reads: Any, writes: Any, *arguments: Any, **constants: Any
) -> None:
    """Starts nothing: what a fused operation is given is on the device, and its last stride is 1."""
    given = [leaf for leaf in tree_leaves((reads, writes, arguments)) if isinstance(leaf, Tensor)]
    assert {tensor.device for tensor in given} == {CUDA}
    assert all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in given)
    assert 0 < grid[1] < 2**16
    assert grid[0] > 0


class CheckedKernel(KernelOnOffer):
    """A kernel, with what it asks of its tensors and what is asked of its results."""

    def __init__(self, kernel: KernelOnOffer) -> None:
        self.kernel, self.name = kernel, kernel.name

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return self.kernel.refuses(device, dtype, head_dim)

    def takes(self, block: BlockKind) -> bool:
        return self.kernel.takes(block)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> Any:
        self._check_inputs(mode.causal, query, key, value, query)
        self._check_sequences(query, key, mode)
        output, log_sum_exp = self.kernel.forward(query, key, value, mode)
        _assert_like([output], [query])
        assert (log_sum_exp.shape, log_sum_exp.dtype) == (query.shape[:3], torch.float32)
        assert log_sum_exp.device == CUDA
        return output, log_sum_exp

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> Any:
        self._check_inputs(mode.causal, query, key, value, grad, output)
        self._check_sequences(query, key, mode)
        assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)
        if self.name != "math":
            assert lse.is_contiguous()
            assert_reads_16_bytes(lse, rows=False)
        grads = self.kernel.backward(grad, query, key, value, output, lse, mode)
        _assert_like(grads, [query, key, value])
        return grads

    def _check_sequences(self, query: Tensor, key: Tensor, mode: Mode) -> None:
        sequences = mode.sequences
        if sequences is None:
            return
        assert self.name != "cudnn"
        assert query.shape[0] == 1
        assert len(sequences.queries) > 1
        for lengths, ends, tensor in (
            (sequences.queries, sequences.query_ends, query),
            (sequences.keys, sequences.key_ends, key),
        ):
            assert min(lengths) > 0
            assert sum(lengths) == tensor.shape[2]
            assert (ends.shape, ends.dtype, ends.device) == ((len(lengths) + 1,), torch.int32, CUDA)
        assert not mode.causal or sequences.queries == sequences.keys

    def _check_inputs(
        self, causal: bool, query: Tensor, key: Tensor, value: Tensor, *outputs: Tensor
    ) -> None:
        tensors = [query, key, value, *outputs]
        assert {tensor.device for tensor in tensors} == {CUDA}
        assert len({tensor.dtype for tensor in tensors}) == 1
        assert all(tensor.shape == query.shape for tensor in outputs)
        assert key.shape == value.shape
        assert (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
        assert query.shape[1] % key.shape[1] == 0
        assert min(query.numel(), key.numel()) > 0
        assert not causal or query.shape[2] == key.shape[2]
        if self.name == "math":
            return
        assert query.dtype in HALF
        assert query.shape[3] % 8 == 0
        assert query.shape[3] <= (128 if self.name == "cudnn" else 256)
        for tensor in tensors:
            assert tensor.stride(3) == 1
            assert_reads_16_bytes(tensor)
        if self.name == "cudnn":
            assert min(query.shape[2], key.shape[2]) > 1
            hopper = torch.cuda.get_device_capability() == (9, 0)
            assert causal or key.shape[2] % 128 != 64 or not hopper or torch.backends.cudnn.version() >= 92600


def assert_reads_16_bytes(tensor: Tensor, rows: bool = True) -> None:
    """Every row begins at a multiple of 16 bytes, counted from the storage's beginning."""
    indices = [(0,) * tensor.dim()]
    for dim in range(tensor.dim() - 1) if rows else ():
        if tensor.shape[dim] > 1:
            indices.append(tuple(int(other == dim) for other in range(tensor.dim())))
    for index in indices:
        begin = tensor.storage_offset() + sum(
            i * step for i, step in zip(index, tensor.stride(), strict=True)
        )
        assert begin * tensor.element_size() % 16 == 0, (tensor.shape, tensor.stride(), begin)


def _assert_like(results: Any, tensors: Any) -> None:
    for result, tensor in zip(results, tensors, strict=True):
        assert (result.shape, result.dtype, result.device) == (tensor.shape, tensor.dtype, CUDA)
        assert result.stride(3) == 1


def checked_kernel(dtype: torch.dtype, head_dim: int, name: str = "auto") -> KernelDispatch:
    """What `select_kernel` gives, of checked kernels."""
    usable = [kernel for kernel in ranked_kernels(CUDA) if kernel.refuses(CUDA, dtype, head_dim) is None]
    usable.sort(key=lambda kernel: kernel.name != name)
    return KernelDispatch([CheckedKernel(kernel) for kernel in usable])


@dataclass
class Wire:
    """Stands where tensors would be sent, for all ranks of a domain one after the other.

    Args:
        sent: numbers of elements from one rank to another, in order, by what orders them.
        received: likewise, at the other end.
    """

    rank: int = 0
    members: tuple[int, ...] = ()
    sent: dict[Any, list[int]] = field(default_factory=lambda: defaultdict(list))
    received: dict[Any, list[int]] = field(default_factory=lambda: defaultdict(list))

    def all_to_all(self, received: Any, sent: Any, received_sizes: Any, sent_sizes: Any, group: Any) -> Any:
        for tensor, sizes in ((received, received_sizes), (sent, sent_sizes)):
            _assert_sendable(tensor)
            assert sum(sizes) == tensor.numel()
        for peer, arrives, leaves in zip(self.members, received_sizes, sent_sizes, strict=True):
            self.sent["a2a", self.rank, peer].append(leaves)
            self.received["a2a", peer, self.rank].append(arrives)
        return Transfers()

    def post(self, receives: Any, sends: Any, group: Any, tag: int) -> Any:
        for message in (*receives, *sends):
            _assert_sendable(message.tensor)
        for message in receives:
            self.received["domain", message.peer, self.rank].append(message.tensor.numel())
        for message in sends:
            self.sent["domain", self.rank, message.peer].append(message.tensor.numel())
        return Transfers()

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        with (
            mock.patch.object(all_to_all, "all_to_all", self.all_to_all),
            mock.patch.object(exchange, "post", self.post),
        ):
            yield


def _assert_sendable(tensor: Tensor) -> None:
    assert tensor.is_contiguous()
    assert tensor.device == CUDA


class Context:
    """What autograd gives a function; its engine does not run on fake tensors."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def run_layer(
    plan: Any, mask: Any, batch: int, dtype: torch.dtype, has_sinks: bool, name: str = "auto"
) -> Wire:
    """One attention layer, forward and backward, of every rank of a plan's first replica; inside `gpu`."""
    workload, domain, wire = plan.workload, plan.replicas[0].domain, Wire()
    heads, kv_heads = workload.local_heads, workload.local_kv_heads
    keys, values = workload.head_dim, workload.value_size
    for rank in range(len(domain.members)):
        schedule = Schedules(workload, domain, rank, plan.exchange.parts)(mask)
        wire.rank, wire.members = rank, tuple(schedule.members)
        kernel = checked_kernel(dtype, max(keys, values), name)
        groups = mock.sentinel.domain, mock.sentinel.a2a
        with wire.instead(), fake_tensors(), torch.no_grad():
            sizes = ((heads, keys), (kv_heads, keys), (kv_heads, values))
            query, key, value = (
                torch.empty(schedule.tokens, batch, count, size, dtype=dtype, device=CUDA)
                for count, size in sizes
            )
            sinks = torch.empty(heads, dtype=dtype, device=CUDA) if has_sinks else None
            inputs = Inputs.from_tensors(query, key, value, sinks)
            layer = AttentionLayer(schedule, kernel, 0.1, *groups, plan.exchange.window, inputs)
            context: Any = Context()
            output = _DomainAttentionFunction.forward(context, query, key, value, sinks, None, layer)
            assert output.shape == (schedule.tokens, batch, heads, values)
            assert (output.dtype, output.device, output.is_contiguous()) == (dtype, CUDA, True)
            *grads, _, nothing = _DomainAttentionFunction.backward(context, torch.empty_like(output))
            assert nothing is None
            for grad, tensor in zip(grads, (query, key, value, sinks), strict=True):
                assert (grad is None) == (tensor is None)
                if grad is not None and tensor is not None:
                    assert (grad.shape, grad.dtype, grad.device) == (tensor.shape, dtype, CUDA)
    return wire
