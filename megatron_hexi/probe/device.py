"""The device of this rank (name, memory, kernels and their versions) and the network cards of its host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil
import torch

from megatron_hexi.doctor.facts import InfinibandPort
from megatron_hexi.doctor.machine import find_cpu, find_network
from megatron_hexi.errors import HexiError
from megatron_hexi.probe.document import HostCards, Options, RankInfo
from megatron_hexi.runtime.kernels import select_kernel

#: What the kernel calls a link layer.
_FABRICS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


def find_cards(ports: Sequence[InfinibandPort], environment: Mapping[str, str]) -> HostCards | None:
    """Return the fastest kind of cards that are up; of equally fast kinds the more numerous.

    Hosts often have slower cards besides, for storage.

    Args:
        environment: NCCL_IB_DISABLE=1 leaves NCCL to TCP.
    """
    if environment.get("NCCL_IB_DISABLE") == "1":
        return None
    counts = Counter(
        (_FABRICS[port.link_layer], port.gbit_s)
        for port in ports
        if port.is_up and port.link_layer in _FABRICS and port.gbit_s
    )
    if not counts:
        return None
    fabric, gbit_s = max(counts, key=lambda kind: (kind[1], counts[kind], kind[0]))
    return HostCards(fabric, counts[fabric, gbit_s], gbit_s)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: The distribution that a kernel comes from, where it is not torch.
_PACKAGES = {"flash-attn-2": "flash-attn", "flash-attn-3": "flash-attn-3"}


def rank_info(
    options: Options, device: torch.device, environment: Mapping[str, str], host_ranks: int
) -> RankInfo:
    """Return the facts of this rank that must not change when a probe is resumed."""
    dtype = DTYPES[options.precision]
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if gpu and dtype == torch.bfloat16 and gpu.major < 8:
        raise HexiError(f"--precision bf16: {gpu.name} has no bf16; use --precision fp16")
    kernels = tuple(select_kernel(name, device, dtype, options.head_dim).name for name in options.kernels)
    return RankInfo(
        # By this name Kubernetes or Slurm gives it again.
        host=environment.get("HEXI_HOST") or environment.get("SLURMD_NODENAME") or socket.gethostname(),
        group=environment.get("GROUP_RANK") or environment.get("SLURM_NODEID", ""),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        kind="cuda" if gpu else "cpu",
        gpu=f"{gpu.name}{_mps_share(environment)}" if gpu else find_cpu().model or platform.machine(),
        memory_bytes=gpu.total_memory if gpu else _cpu_memory(host_ranks),
        capability=(gpu.major, gpu.minor) if gpu else (0, 0),
        kernels=kernels,
        versions=_versions(kernels, cuda=gpu is not None),
        cards=find_cards(find_network().infiniband, environment) if gpu else None,
    )


def _mps_share(environment: Mapping[str, str]) -> str:
    """Return the name of this process's part of a GPU under CUDA's Multi-Process Service."""
    share = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    return "" if share == "100" else f" MPS {share}%"


def usable_bytes(device: torch.device, host_ranks: int) -> int:
    """Return the bytes that a job can use: free on the GPU beside the CUDA context, or a CPU rank's share."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    used = psutil.Process().memory_info()
    return max(1, _cpu_memory(host_ranks) - (used.data if _data_limit() else used.rss))


def host_bytes(host_ranks: int) -> int:
    """Return this rank's share of its host's free memory, bytes."""
    return psutil.virtual_memory().available // host_ranks


def _cpu_memory(host_ranks: int) -> int:
    """Return the limit on this process's data, bytes, or else its share of the host's memory."""
    return _data_limit() or psutil.virtual_memory().total // host_ranks


def _data_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _versions(kernels: tuple[str, ...], *, cuda: bool) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if cuda:
        versions["CUDA"] = str(torch.version.cuda)
    if "cudnn" in kernels:
        versions["cuDNN"] = str(torch.backends.cudnn.version())
    for package in (_PACKAGES[kernel] for kernel in kernels if kernel in _PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "unknown"
    if not cuda:
        versions["threads"] = str(torch.get_num_threads())
    return versions


def local_device() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1:  # the launcher shows each rank its own
        local = 0
    if local >= count:
        raise HexiError(
            f"local rank {local} has no GPU: {socket.gethostname()} shows {count}; start one rank for each"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context, which takes memory
    return device
