"""Network, limits and environment variables."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from megatron_hexi.doctor.facts import InfinibandPort, Interface, Limits, Network

#: Variables that steer communication and CUDA. The rest of the environment may be private.
_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "NVTE_", "TORCH_NCCL_", "UCX_")
_NAMES = (
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)

_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")


def find_network(infiniband: Path = _INFINIBAND) -> Network:
    """Interfaces, InfiniBand ports, and what the machine's own name resolves to.

    Args:
        infiniband: the kernel's folder of InfiniBand devices.

    Raises:
        ImportError: psutil is not installed.
    """
    return Network(_interfaces(), _ports(infiniband), _host_addresses())


def find_limits() -> Limits:
    """The size of /dev/shm, and how much memory may be locked."""
    shared = shutil.disk_usage(_SHARED_MEMORY).total / 2**30 if _SHARED_MEMORY.is_dir() else None
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Limits(
        shared_memory_gib=None if shared is None else round(shared, 3),
        locked_memory_gib=None if locked == resource.RLIM_INFINITY else round(locked / 2**30, 3),
    )


def find_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables of an environment that steer communication and CUDA, sorted."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    states = psutil.net_if_stats()
    wanted = (socket.AF_INET, socket.AF_INET6)
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        speed = state.speed if state is not None else 0
        found.append(
            Interface(
                name,
                up=state is not None and state.isup,
                speed_mbit_s=speed if 0 < speed < 65535 else None,  # 65535: the driver does not know
                addresses=tuple(a.address.partition("%")[0] for a in addresses if a.family in wanted),
            )
        )
    return tuple(found)


def _ports(root: Path) -> tuple[InfinibandPort, ...]:
    found = []
    for folder in sorted(root.glob("*/ports/*")):
        values = []
        for name in ("state", "rate", "link_layer"):
            text = ""
            with contextlib.suppress(OSError):  # a port may be closed to us
                text = (folder / name).read_text().strip()
            values.append(text)
        state = values[0].rpartition(":")[2].strip()  # "4: ACTIVE"
        device = folder.parent.parent.name
        found.append(InfinibandPort(device, int(folder.name), state or "unknown", values[1], values[2]))
    return tuple(found)


def _host_addresses() -> tuple[str, ...]:
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(answer[4][0]).partition("%")[0] for answer in answers}))
