"""What was found on a machine: plain values that can be judged, sent to rank 0 and printed as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Package:
    """One Python package.

    Attributes:
        name: of its distribution.
        version: as installed; ``None`` where it is not.
        needs: the versions that megatron-hexi needs (PEP 440), ``None`` where it does without.
        broken: why it cannot be imported; ``None`` where it can, or was not tried.
        location: the folder that it is imported from, where that was looked at.
    """

    name: str
    version: str | None
    needs: str | None = None
    broken: str | None = None
    location: str | None = None


@dataclass(frozen=True)
class Torch:
    """How torch was built.

    Attributes:
        cuda: version of the CUDA runtime in it; ``None`` in a build without.
        cudnn: version of cuDNN, likewise.
        nccl: version of NCCL, likewise.
        architectures: what its CUDA code was compiled for (``sm_90``, ``compute_120``).
        cudnn_folder: where another cuDNN than torch's was loaded, the folder of torch's.
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
        version: of the kernel module; ``None`` where none is loaded.
        cuda: the newest CUDA version that its user library supports; ``None`` where there is no library.
    """

    version: str | None
    cuda: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class GpuState:
    """The driver's settings of one GPU, as nvidia-smi reports them; ``None`` for what it does not report.

    Attributes:
        name: of the GPU.
        persistence: whether the driver stays loaded without a process.
        ecc: whether its memory corrects errors.
        mig: whether it may be cut into slices.
        power_limit_w: what it may draw.
        default_power_w: what it may draw as shipped.
        max_clock_mhz: of its multiprocessors.
        slowed: why its clocks are held down now.
        links: to each GPU of the node, as ``nvidia-smi topo -m`` has it: ``X``, ``NV18``, ``PIX``, ``SYS``.
    """

    name: str
    persistence: bool | None = None
    ecc: bool | None = None
    mig: bool | None = None
    power_limit_w: float | None = None
    default_power_w: float | None = None
    max_clock_mhz: int | None = None
    slowed: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cpu:
    """The processors of a machine.

    Attributes:
        vendor: as the processor spells it: ``GenuineIntel``, ``AuthenticAMD``; empty where it does not.
        model: as sold.
        machine: architecture of its instructions: ``x86_64``, ``aarch64``.
        numa_nodes: parts of the memory.
    """

    vendor: str = ""
    model: str = ""
    machine: str = ""
    numa_nodes: int | None = None


@dataclass(frozen=True)
class KernelChoice:
    """The attention kernel that ``--hexi-kernel auto`` takes for tensors of one kind.

    Attributes:
        device: the GPU's name, or ``cpu``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        head_dim: size of one head.
        kernel: the one taken.
        verdicts: all kernels, the fastest first, each with why it refuses; empty where it does not.
    """

    device: str
    dtype: str
    head_dim: int
    kernel: str
    verdicts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PatchState:
    """One patch of Megatron, and whether the installed Megatron is what it was written for.

    Attributes:
        target: what it replaces.
        why: what for.
        state: whether it can be put on.
        problem: what does not fit, and what to do; empty where it fits.
    """

    target: str
    why: str
    state: Literal["fits", "not needed", "does not fit"]
    problem: str = ""


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM checkout, and whether our line is in its training scripts.

    Attributes:
        path: the folder.
        state: ``unknown`` where it is not a checkout that we have a diff for.
        problem: why it is unknown, and what to do.
    """

    path: str
    state: Literal["patched", "not patched", "unknown"]
    problem: str = ""


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        speed_mbit_s: nominal; ``None`` where the system does not say (virtual ones, most of InfiniBand's).
        addresses: IPv4 and IPv6.
        networks: those of its IPv4 addresses, ``10.0.0.0/24``.
        mtu: largest packet, bytes; ``None`` where it is not known.
    """

    name: str
    up: bool
    speed_mbit_s: int | None
    addresses: tuple[str, ...]
    networks: tuple[str, ...] = ()
    mtu: int | None = None


@dataclass(frozen=True)
class InfinibandPort:
    """One port of an InfiniBand or RoCE device, in the kernel's words: ``ACTIVE``, ``400 Gb/sec (4X)``.

    Attributes:
        vendor: PCI number of the device's vendor, such as ``0x15b3`` (NVIDIA); empty where it has none.
    """

    device: str
    port: int
    state: str
    rate: str
    link_layer: str
    vendor: str = ""


@dataclass(frozen=True)
class Network:
    """How the machine is connected.

    Attributes:
        host_addresses: what its own name resolves to; gloo listens there unless told otherwise.
    """

    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[InfinibandPort, ...] = ()
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What the system grants a process.

    Attributes:
        shared_memory_gib: size of /dev/shm.
        locked_memory_gib: what may be pinned for a network card; ``None`` for no limit.
    """

    shared_memory_gib: float | None = None
    locked_memory_gib: float | None = None


@dataclass(frozen=True)
class Facts:
    """All that one process found.

    Attributes:
        host: name of the machine.
        rank: number in the job; ``None`` without a launcher.
        python: version of the interpreter.
        executable: its path.
        packages: what matters to a job, whether installed or not.
        torch: ``None`` where it cannot be imported.
        gpus: those that torch sees.
        gpu_states: of all GPUs of the machine; empty without nvidia-smi.
        cpu: the machine's processors.
        nccl_plugins: libraries that NCCL would load, by their names.
        kernels: empty without torch.
        triton_lacks: what keeps Triton from launching kernels; empty: nothing, or not known.
        patches: empty without Megatron.
        checkout: ``None`` where none was named.
        environment: the variables that steer communication and CUDA.
        unknown: parts that could not be looked at: name and reason.
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
    cpu: Cpu = Cpu()
    nccl_plugins: tuple[str, ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    triton_lacks: str = ""
    patches: tuple[PatchState, ...] = ()
    checkout: Checkout | None = None
    network: Network = Network()
    limits: Limits = Limits()
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[tuple[str, str], ...] = ()

    def package(self, name: str) -> Package:
        """The package of that name; one that is not installed where it was not looked for."""
        return next((package for package in self.packages if package.name == name), Package(name, None))
