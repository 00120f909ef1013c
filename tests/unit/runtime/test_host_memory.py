"""Host memory holds what is copied there, and is no part of a process's data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_hexi.runtime.host_memory import HostMemory
from megatron_hexi.runtime.row_channel import DeviceRows, HostRows

CPU = torch.device("cpu")
each_device = pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str
)


def data_bytes() -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_a_limit_on_data_does_not_count_it():
    host, size = HostMemory(CPU), 2**27
    before = data_bytes()
    kept = host.empty((size // 4,), torch.float32)
    kept.fill_(1.5)
    assert data_bytes() - before < size // 4
    assert host.nbytes == size
    assert kept[-1] == 1.5
    own = torch.ones(size // 4)
    assert data_bytes() - before >= size
    assert own[-1] == 1


@each_device
def test_copies_there_and_back_are_exact(device):
    host = HostMemory(device)
    values = torch.randn(7, 3, device=device).to(torch.bfloat16)
    kept = host.copy_of(values)
    back = torch.empty_like(values)
    host.copy_back(back, kept).wait()
    assert torch.equal(back, values)
    host.copy_out(kept, 2 * values)
    host.drain()
    assert torch.equal(kept, (2 * values).cpu())
    assert host.copy_of(values, torch.float32).dtype == torch.float32
    assert host.empty((0, 4), torch.float32).shape == (0, 4)


@each_device
def test_rows_come_back_one_ahead_and_memory_serves_again(device):
    host = HostMemory(device)
    size = 3 if device == CPU else 2**20  # so large that copies are under way when they are asked for
    stores = HostRows(host), DeviceRows()
    for count in (4, 4, 1, 2):  # as documents bring more or fewer
        rows = [torch.randn(count, 2, size, device=device) + count for _ in range(3)]
        for store in stores:
            for number, one in enumerate(rows):
                store.put((1, number), one)
            for number, one in enumerate(rows):
                following = (1, number + 1) if number < 2 else None
                assert torch.equal(store.get((1, number), following), one)
            for number, one in enumerate(rows):
                following = (1, number + 1) if number < 2 else None
                assert torch.equal(store.pop((1, number), following), one)
                store.put((1, number), -one)  # the gradient, in its place
            assert torch.equal(store.pop((1, 0), (1, 1)), -rows[0])
            assert torch.equal(store.pop((1, 1), (1, 2)), -rows[1])
            assert torch.equal(store.pop((1, 2), None), -rows[2])
    assert host.nbytes == 3 * 2 * rows[0].nbytes
    for count in (5, 8):  # the buffers of four rows grow to eight
        rows = [torch.randn(count, 2, size, device=device)]
        stores[0].put((1, 0), rows[0])
        assert torch.equal(stores[0].pop((1, 0), None), rows[0])
    assert host.nbytes == (3 * 4 + 8) * rows[0][0].nbytes
