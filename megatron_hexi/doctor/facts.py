"""Facts about a machine as plain data: judged by rules, sent to rank 0, printed as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Package:
    """A Python package.

    Attributes:
        version: ``None`` where it is not installed.
        needs: versions that megatron-hexi needs (PEP 440); ``None`` where it does not need it.
        broken: why it cannot be imported; ``None`` where it can be, or was not tried.
        location: the folder that it is imported from, where known.
    """

    name: str
    version: str | None
    needs: str | None = None
    broken: str | None = None
    location: str | None = None


@dataclass(frozen=True)
class Torch:
    """The build of torch, with versions of libraries that are ``None`` in a build without CUDA.

    Attributes:
        architectures: targets of its CUDA code (``sm_90``, ``compute_120``).
        cudnn_folder: folder of torch's cuDNN, where another cuDNN was loaded.
    """

    cuda: str | None
    cudnn: str | None
    nccl: str | None
    architectures: tuple[str, ...] = ()
    cudnn_folder: str = ""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: version of the kernel module; ``None`` where none is loaded.
        cuda: newest CUDA version that its user library supports; ``None`` without a library.
    """

    version: str | None
    cuda: str | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class GpuState:
    """The driver's settings of a GPU, from nvidia-smi; ``None`` for settings that it does not report.

    Attributes:
        persistence: whether the driver stays loaded without a process.
        default_power_w: power limit as shipped.
        max_clock_mhz: highest clock of its multiprocessors.
        slowed: reasons why its clocks are reduced now.
    """

    name: str
    persistence: bool | None = None
    ecc: bool | None = None
    mig: bool | None = None
    power_limit_w: float | None = None
    default_power_w: float | None = None
    max_clock_mhz: int | None = None
    slowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cpu:
    """The processors of a machine.

    Attributes:
        vendor: as the processor reports it: ``GenuineIntel``, ``AuthenticAMD``; may be empty.
        machine: instruction set: ``x86_64``, ``aarch64``.
    """

    vendor: str = ""
    model: str = ""
    machine: str = ""
    numa_nodes: int | None = None


@dataclass(frozen=True)
class KernelChoice:
    """The attention kernel that ``--hexi-kernel auto`` chooses for one kind of tensors.

    Attributes:
        device: the GPU's name, or ``cpu``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        verdicts: all kernels, the fastest first, each with the reason why it refuses, or an empty text.
    """

    device: str
    dtype: str
    head_dim: int
    kernel: str
    verdicts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PatchState:
    """A patch of Megatron, and whether it fits the installed Megatron.

    Attributes:
        target: the replaced attribute.
        problem: error with a remedy; empty where it fits.
    """

    target: str
    why: str
    state: Literal["fits", "not needed", "does not fit"]
    problem: str = ""


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM checkout, and whether its training scripts have our import line.

    Attributes:
        state: ``unknown`` where this package has no diff for the checkout's version.
        problem: why it is unknown, with a remedy.
    """

    path: str
    state: Literal["patched", "not patched", "unknown"]
    problem: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        speed_mbit_s: nominal speed; ``None`` where unknown (virtual interfaces, most of InfiniBand's).
        addresses: IPv4 and IPv6 addresses.
        networks: networks of its IPv4 addresses, ``10.0.0.0/24``.
        mtu: largest packet, bytes; ``None`` where unknown.
    """

    name: str
    up: bool
    speed_mbit_s: int | None
    addresses: tuple[str, ...]
    networks: tuple[str, ...] = ()
    mtu: int | None = None


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE device, in the kernel's words: ``ACTIVE``, ``400 Gb/sec (4X)``.

    Attributes:
        vendor: PCI number of the device's vendor, such as ``0x15b3`` (NVIDIA); empty where it has none.
    """

    device: str
    port: int
    state: str
    rate: str
    link_layer: str
    vendor: str = ""

    @property
    def is_up(self) -> bool:
        """Whether the port is connected."""
        return self.state == "ACTIVE"

    @property
    def gbit_s(self) -> float:
        """The port's rate, 10^9 bits/s; 0 if unknown."""
        match = re.match(r"(\d+(\.\d+)?) Gb/sec", self.rate)
        return float(match[1]) if match else 0.0


@dataclass(frozen=True)
class NetworkFacts:
    """The network connections of a machine.

    Attributes:
        host_addresses: addresses of its own name; gloo listens there by default.
    """

    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[InfinibandPort, ...] = ()
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits of the system for a process.

    Attributes:
        shared_memory_gib: size of /dev/shm.
        locked_memory_gib: memory that may be pinned for a network card; ``None`` for no limit.
    """

    shared_memory_gib: float | None = None
    locked_memory_gib: float | None = None


@dataclass(frozen=True)
class Facts:
    """All facts about one process and its machine.

    Attributes:
        host: name of the machine.
        rank: number in the job; ``None`` without a launcher.
        python: version of the interpreter.
        executable: its path.
        packages: packages that matter to a job, installed or not.
        torch: ``None`` where it cannot be imported.
        gpus: GPUs that torch sees.
        gpu_states: states of all GPUs of the machine; empty without nvidia-smi.
        gpu_links: links of each of them to all, as in ``nvidia-smi topo -m``: ``X``, ``NV18``, ``PIX``.
        cpu: the machine's processors.
        nccl_plugins: names of the libraries that NCCL would load.
        kernels: chosen attention kernels; empty without torch.
        triton_lacks: what keeps Triton from launching kernels; empty if nothing, or unknown.
        patches: states of all patches; empty without Megatron.
        checkout: ``None`` where none was given.
        environment: variables that affect communication and CUDA.
        unknown: parts that could not be examined: name and reason.
    """

    host: str
    rank: int | None
    python: str
    executable: str
    packages: tuple[Package, ...] = ()
    torch: Torch | None = None
    driver: Driver = Driver(None, None)
    gpus: tuple[Gpu, ...] = ()
    gpu_states: tuple[GpuState, ...] = ()
    gpu_links: tuple[tuple[str, ...], ...] = ()
    cpu: Cpu = Cpu()
    nccl_plugins: tuple[str, ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    triton_lacks: str = ""
    patches: tuple[PatchState, ...] = ()
    checkout: Checkout | None = None
    network: NetworkFacts = NetworkFacts()
    limits: Limits = Limits()
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[tuple[str, str], ...] = ()

    def package(self, name: str) -> Package:
        """Return the package with a name; an uninstalled one where it was not looked for."""
        return next((package for package in self.packages if package.name == name), Package(name, None))
