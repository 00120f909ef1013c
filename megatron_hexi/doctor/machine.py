"""Facts about a machine: network, processors, limits, environment, and the driver's settings of its GPUs."""

from __future__ import annotations

import contextlib
import ctypes.util
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from megatron_hexi.doctor.facts import Cpu, GpuState, InfinibandPort, Interface, Limits, NetworkFacts
from megatron_hexi.errors import PlatformError
from megatron_hexi.external_tool import output_of

#: Variables that affect communication and CUDA. The rest of the environment may be private.
_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "NVTE_", "TORCH_NCCL_", "UCX_")
_NAMES = (
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)

_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_CPUS = Path("/proc/cpuinfo")
_NUMA = Path("/sys/devices/system/node")
#: Plugins that NCCL loads where it finds them: https://github.com/NVIDIA/nccl/tree/master/plugins.
_PLUGINS = ("nccl-net", "nccl-tuner")


def find_network(infiniband: Path = _INFINIBAND) -> NetworkFacts:
    """Return interfaces, InfiniBand ports, and the addresses of the machine's own name.

    Raises:
        ImportError: psutil is not installed.
    """
    return NetworkFacts(_interfaces(), _ports(infiniband), _host_addresses())


def find_cpu(cpus: Path = _CPUS, numa: Path = _NUMA) -> Cpu:
    """Return vendor and model of the processors, and the number of NUMA nodes."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpus.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    # ARM's processors state a number for their designer in place of a name.
    vendor = fields.get("vendor_id") or fields.get("CPU implementer", "")
    nodes = len(list(numa.glob("node[0-9]*")))
    return Cpu(vendor, fields.get("model name", ""), platform.machine(), nodes or None)


def find_nccl_plugins(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the plugin libraries that NCCL would load."""
    folders = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return tuple(
        f"lib{name}.so"
        for name in _PLUGINS
        if any((folder / f"lib{name}.so").exists() for folder in folders) or ctypes.util.find_library(name)
    )


def find_limits() -> Limits:
    """Return the size of /dev/shm, and the memory that may be locked."""
    shared = shutil.disk_usage(_SHARED_MEMORY).total / 2**30 if _SHARED_MEMORY.is_dir() else None
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Limits(
        shared_memory_gib=None if shared is None else round(shared, 3),
        locked_memory_gib=None if locked == resource.RLIM_INFINITY else round(locked / 2**30, 3),
    )


def find_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that affect communication and CUDA, sorted."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        speed = state.speed if state is not None else 0
        interfaces.append(
            Interface(
                name,
                up=state is not None and state.isup,
                speed_mbit_s=speed if 0 < speed < 65535 else None,  # 65535: the driver does not know
                addresses=tuple(a.address.partition("%")[0] for a in addresses if a.family in families),
                networks=tuple(
                    str(ipaddress.ip_network(f"{a.address}/{a.netmask}", strict=False))
                    for a in addresses
                    if a.family == socket.AF_INET and a.netmask
                ),
                mtu=state.mtu if state is not None and state.mtu > 0 else None,
            )
        )
    return tuple(interfaces)


def _ports(root: Path) -> tuple[InfinibandPort, ...]:
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        device = folder.parent.parent
        files = (folder / "state", folder / "rate", folder / "link_layer", device / "device" / "vendor")
        state, rate, link_layer, vendor = map(_text_of, files)
        state = state.rpartition(":")[2].strip() or "unknown"  # "4: ACTIVE"
        ports.append(InfinibandPort(device.name, int(folder.name), state, rate, link_layer, vendor))
    return tuple(ports)


def _text_of(file: Path) -> str:
    with contextlib.suppress(OSError):  # a port may be closed to us
        return file.read_text().strip()
    return ""


def _host_addresses() -> tuple[str, ...]:
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(answer[4][0]).partition("%")[0] for answer in answers}))


_QUERY = (
    *("name", "persistence_mode", "ecc.mode.current", "mig.mode.current"),
    *("power.limit", "power.default_limit", "clocks.max.sm", "clocks_throttle_reasons.active"),
)
#: NVML's nvmlClocksEventReason… (nvml.h) that reduce clocks without a setting of the owner.
_SLOWED = {0x8: "hardware slowdown", 0x20: "software thermal limit", 0x40: "heat", 0x80: "power brake"}
_SECONDS = 20
_STATES = {"Enabled": True, "Disabled": False}


def find_gpu_states() -> tuple[GpuState, ...]:
    """Return the state of each GPU of the machine; empty without nvidia-smi."""
    return read_states(_ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"))


def find_gpu_links() -> tuple[tuple[str, ...], ...]:
    """Return the links of each GPU to the GPUs of its node; empty without nvidia-smi."""
    return read_links(_ask("topo", "-m"))


def _ask(*words: str) -> str:
    try:
        return output_of(("nvidia-smi", *words), _SECONDS)
    except FileNotFoundError:
        return ""


def read_states(states: str) -> tuple[GpuState, ...]:
    """Return the states in nvidia-smi's rows of `_QUERY`, separated by commas."""
    gpu_states = []
    for line in filter(None, map(str.strip, states.splitlines())):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY):
            raise PlatformError(f"{line[:200]} (printed by `nvidia-smi --query-gpu`)")
        name, *modes, limit, default, clock, reasons = fields
        persistence, ecc, mig = map(_STATES.get, modes)
        power, default_power, mhz = map(_number, (limit, default, clock))
        mhz = None if mhz is None else int(mhz)
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        slowed = tuple(reason for bit, reason in _SLOWED.items() if bits & bit)
        gpu_states.append(GpuState(name, persistence, ecc, mig, power, default_power, mhz, slowed))
    return tuple(gpu_states)


def read_links(topology: str) -> tuple[tuple[str, ...], ...]:
    """Return each GPU's links to the GPUs of its node, from the matrix of ``nvidia-smi topo -m``."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    return tuple(
        tuple(words[1 : 1 + count])
        for words in lines
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words
    )


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
