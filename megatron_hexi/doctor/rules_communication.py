"""Rules about one process: network, limits, variables, and GPUs with their driver, settings and kernels."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts, Interface, Torch
from megatron_hexi.doctor.findings import Problem, error, note, warning
from megatron_hexi.whole_number import whole_number

#: Size of /dev/shm below which data loaders and NCCL's buffers run out; Docker's default is 0.0625.
_SHARED_MEMORY_GIB = 1.0

#: Variables and values that turn off something that a job needs, with the effect.
_SLOW = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node exchange through the host's memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a node exchange through the network card",
    ("CUDA_LAUNCH_BLOCKING", "1"): "nothing on a GPU overlaps",
    ("NCCL_LAUNCH_MODE", "GROUP"): "messages wait for each other",
}

#: Variables that name a file.
_FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE")

#: Compute capability from which Megatron no longer asks for CUDA_DEVICE_MAX_CONNECTIONS=1 (Blackwell).
_BLACKWELL = 10


def _connections(facts: Facts) -> Iterator[Problem]:
    """Report another value than 1: Megatron then stops with tensor or context parallelism."""
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value in (None, "1") or (facts.gpus and all(gpu.capability[0] >= _BLACKWELL for gpu in facts.gpus)):
        return
    yield error(
        f"CUDA_DEVICE_MAX_CONNECTIONS={value}: Megatron stops with tensor or context parallelism, "
        "on GPUs before Blackwell",
        "unset it (a plan sets it to 1)",
    )


def _interface_names(facts: Facts) -> Iterator[Problem]:
    interfaces = facts.network.interfaces
    if not interfaces:
        return
    usable = [interface.name for interface in interfaces if _usable(interface)]
    remedy = f"name one of those that are up and have an address: {', '.join(usable) or 'none'}"
    names = [interface.name for interface in interfaces]
    for variable, select in (("NCCL_SOCKET_IFNAME", as_nccl), ("GLOO_SOCKET_IFNAME", _as_gloo)):
        value = facts.environment.get(variable)
        if value and not any(name in usable or name == "lo" for name in select(value, names)):
            yield error(f"{variable}={value} names no interface of this machine that can be used", remedy)


def as_nccl(value: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces or cards that NCCL selects by prefix; ``^`` excludes, then ``=``: whole names."""
    excludes, listed = value.startswith("^"), value.removeprefix("^")
    exact, listed = listed.startswith("="), listed.removeprefix("=")
    parts = [part.partition(":")[0] for part in listed.split(",") if part]  # "mlx5_0:1": a port of a card
    return [
        name
        for name in names
        if excludes != any(name == part if exact else name.startswith(part) for part in parts)
    ]


def _as_gloo(value: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces that gloo selects, by whole names."""
    return [name for name in names if name in value.split(",")]


def _cards(facts: Facts) -> Iterator[Problem]:
    ports = facts.network.infiniband
    value = facts.environment.get("NCCL_IB_HCA")
    if value and not as_nccl(value, [port.device for port in ports]):
        devices = ", ".join(sorted({port.device for port in ports})) or "none"
        yield warning(
            f"NCCL_IB_HCA={value} names no InfiniBand device of this machine; NCCL falls back to TCP",
            f"name one of those found ({devices}), or unset it",
        )
    for port in ports:
        if not port.is_up:
            yield warning(
                f"port {port.port} of {port.device} is {port.state}",
                "check cable and subnet manager (ibstat), or leave it out of NCCL_IB_HCA",
            )
    if facts.environment.get("NCCL_IB_DISABLE") == "1" and any(port.is_up for port in ports):
        what = "NCCL_IB_DISABLE=1: nodes exchange by TCP, though InfiniBand is here and up"
        yield warning(what, "unset NCCL_IB_DISABLE")
    if ports and facts.limits.locked_memory_gib is not None:
        yield warning(
            f"only {facts.limits.locked_memory_gib:g} GiB may be locked, and InfiniBand locks its buffers",
            "ulimit -l unlimited; in a container --ulimit memlock=-1",
        )


def _slow_variables(facts: Facts) -> Iterator[Problem]:
    for (variable, value), effect in _SLOW.items():
        if facts.environment.get(variable, "").upper() == value:
            yield warning(f"{variable}={value}: {effect}", f"unset {variable}")


def _missing_files(facts: Facts) -> Iterator[Problem]:
    for variable in _FILES:
        value = facts.environment.get(variable)
        if value and not Path(value).is_file():
            remedy = f"mount it into the container, or unset {variable}"
            yield error(f"{variable}={value}: there is no such file", remedy)


def _debugging(facts: Facts) -> Iterator[Problem]:
    level = facts.environment.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE"):
        yield note(f"NCCL_DEBUG={level}: logs grow, and TRACE slows down", "unset it once NCCL works")


def _only_loopback(facts: Facts) -> Iterator[Problem]:
    if facts.network.interfaces and not any(map(_usable, facts.network.interfaces)):
        yield warning(
            "no network interface but the loopback is up and has an address: no other node can be reached",
            "bring one up; in a container start with --network host",
        )


def _name_is_loopback(facts: Facts) -> Iterator[Problem]:
    """Report a name of the machine that is not its network address: gloo listens at that address."""
    addresses = [ipaddress.ip_address(address) for address in facts.network.host_addresses]
    if "GLOO_SOCKET_IFNAME" in facts.environment or not facts.network.interfaces:
        return
    if all(address.is_loopback for address in addresses):
        points = ", ".join(facts.network.host_addresses) or "no address"
        usable = [interface.name for interface in facts.network.interfaces if _usable(interface)]
        # Within one node this is right; with several nodes gloo fails.
        several = facts.environment.get("WORLD_SIZE") != facts.environment.get("LOCAL_WORLD_SIZE")
        yield Problem(
            "warning" if several else "note",
            f"the machine's name {facts.host} stands for {points}: gloo is reached from this node alone",
            f"for jobs over several nodes set GLOO_SOCKET_IFNAME={usable[0] if usable else 'INTERFACE'}",
        )


def _shared_memory(facts: Facts) -> Iterator[Problem]:
    size = facts.limits.shared_memory_gib
    if size is not None and size < _SHARED_MEMORY_GIB:
        yield warning(
            f"/dev/shm holds {size * 1024:.0f} MiB: NCCL and data loaders need more",
            "start the container with --ipc=host or --shm-size=16g",
        )


def _usable(interface: Interface) -> bool:
    addresses = map(ipaddress.ip_address, interface.addresses)
    return interface.up and any(not (one.is_loopback or one.is_link_local) for one in addresses)


COMMUNICATION_RULES = (
    *(_connections, _interface_names, _cards, _slow_variables, _missing_files),
    *(_debugging, _only_loopback, _name_is_loopback, _shared_memory),
)


#: The oldest driver branch for each major version of CUDA on data-centre GPUs, by CUDA's minor version
#: compatibility: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}


def _no_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.gpus or facts.torch is None:
        return
    driver, built = facts.driver, facts.torch.cuda
    if driver.version is None and driver.cuda is None:
        remedy = "nothing if intended; otherwise install the driver"
        yield note("no GPU: training runs on the CPU, with gloo", remedy)
        return
    summary = f"an NVIDIA driver is here ({driver.version or 'its library alone'}), and torch sees no GPU"
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if built is None:
        yield error(
            f"{summary}: torch {facts.package('torch').version} is built without CUDA",
            "install a torch with CUDA, or run in the container (docs/docker.md)",
        )
    elif visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        what = f"{summary}: CUDA_VISIBLE_DEVICES={visible!r} hides all of them"
        yield error(what, "unset CUDA_VISIBLE_DEVICES")
    elif driver.cuda is not None and Version(driver.cuda).major < Version(built).major:
        branch = _DRIVER_OF_CUDA.get(Version(built).major)
        least = "a newer driver" if branch is None else f"driver {branch} or newer"
        yield error(
            f"{summary}: the driver goes up to CUDA {driver.cuda}, torch is built for {built}",
            f"install {least}, or a torch built for an older CUDA",
        )
    else:
        remedy = "see what nvidia-smi says; a container needs --gpus all, a SLURM step --gpus-per-node"
        yield error(summary, remedy)


def _no_code_for_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.torch is None:
        return
    for name, (major, minor) in {gpu.name: gpu.capability for gpu in facts.gpus}.items():
        if not _has_code(facts.torch, major, minor):
            yield error(
                f"torch has no code for {name} (compute capability {major}.{minor}), "
                f"only for {', '.join(facts.torch.architectures) or 'none'}",
                "install a torch that was built for it",
            )


def _has_code(torch: Torch, major: int, minor: int) -> bool:
    """Whether torch runs on a GPU: machine code of its major version, or an intermediate form."""
    for architecture in torch.architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")  # sm_90a: for one chip alone
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def _too_few_gpus(facts: Facts) -> Iterator[Problem]:
    local_rank = whole_number(facts.environment.get("LOCAL_RANK", "")) or 0
    if facts.gpus and local_rank >= len(facts.gpus):
        yield error(
            f"LOCAL_RANK is beyond the GPUs that the rank sees ({len(facts.gpus)}), and says which it takes",
            "let every rank see all GPUs of its node: srun --gpus-per-node, no --gpus-per-task or --gpu-bind",
        )


def _no_nccl(facts: Facts) -> Iterator[Problem]:
    if facts.gpus and facts.torch is not None and facts.torch.nccl is None:
        yield error("torch is built without NCCL", "install a torch with CUDA and NCCL")


def _kernels(facts: Facts) -> Iterator[Problem]:
    """Report kernels that would be faster, for bf16 and heads of 128, the most common case."""
    for choice in facts.kernels:
        if choice.device == "cpu" or (choice.dtype, choice.head_dim) != ("bf16", 128):
            continue
        if choice.kernel == "math":
            yield warning(
                f"{choice.device}: no fast attention kernel takes bf16 with heads of 128; the plain one "
                "would be used, whose memory grows with the square of the length",
                "remove what prevents a faster one: "
                + ", ".join(f"{name} ({reason})" for name, reason in choice.verdicts if reason),
            )
        for name, reason in choice.verdicts:
            if name == choice.kernel:
                break  # the rest are slower
            if "is not installed" in reason:
                yield note(
                    f"{choice.device}: attention runs with {choice.kernel}, {name} is faster ({reason})",
                    f"install {name.removesuffix('-2')}",
                )


def _fused_kernels(facts: Facts) -> Iterator[Problem]:
    """Report why Triton cannot compile the kernels for copies and sums."""
    if not facts.gpus or not facts.triton_lacks:
        return
    if "compiler" in facts.triton_lacks:
        remedy = "install gcc, or set CC to a C compiler"
    elif "Python.h" in facts.triton_lacks:
        remedy = "install Python's headers: python3-dev on Debian, python3-devel on Fedora"
    else:
        remedy = "pip install triton, of the version that this torch names"
    what = f"{facts.triton_lacks}: copies and sums around attention run in plain torch, in more launches"
    yield warning(what, remedy)


#: The first driver branch for each compute capability newer than R525: release notes,
#: https://docs.nvidia.com/datacenter/tesla/ (B200 and RTX Blackwell: 570).
_DRIVER_OF_CAPABILITY = {(12, 0): 570, (10, 3): 575, (10, 0): 570}
#: Part of the default power below which a limit is a setting, not rounding.
_POWER_SHARE = 0.98


def _too_old_for_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.driver.version is None:
        return
    for name, capability in dict.fromkeys((gpu.name, gpu.capability) for gpu in facts.gpus):
        least = _DRIVER_OF_CAPABILITY.get(capability)
        if least is not None and Version(facts.driver.version).major < least:
            yield error(
                f"driver {facts.driver.version} is older than {name}",
                f"install driver {least} or newer on these nodes; others may keep theirs",
            )


def _power(facts: Facts) -> Iterator[Problem]:
    for name, limit, default in dict.fromkeys(
        (state.name, state.power_limit_w, state.default_power_w) for state in facts.gpu_states
    ):
        if limit is not None and default is not None and limit < _POWER_SHARE * default:
            yield warning(
                f"{name} may draw {limit:g} W of {default:g} W: slower than the catalogue's curves",
                f"nvidia-smi -pl {default:g} as root, or measure it as it is with hexi probe",
            )


def _slowed(facts: Facts) -> Iterator[Problem]:
    for name, reasons in dict.fromkeys((state.name, state.slowed) for state in facts.gpu_states):
        if reasons:
            yield warning(
                f"clocks of a {name} are held down now: {', '.join(reasons)}",
                "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; cooling and power supply",
            )


def _mig(facts: Facts) -> Iterator[Problem]:
    if any(" MIG " in gpu.name for gpu in facts.gpus):
        return  # the job runs on slices
    cut = [state.name for state in facts.gpu_states if state.mig]
    if cut:
        yield warning(
            f"MIG is on at {len(cut)} of {len(facts.gpu_states)} GPUs ({cut[0]}): NCCL has no NVLink there",
            "nvidia-smi -mig 0 as root, on these nodes, with no job running",
        )


def _persistence(facts: Facts) -> Iterator[Problem]:
    if any(state.persistence is False for state in facts.gpu_states):
        yield note(
            "persistence mode is off: the driver reloads for each job and forgets clocks and power limits",
            "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 as root",
        )


GPU_RULES = (
    *(_no_gpu, _no_code_for_gpu, _too_few_gpus, _no_nccl, _kernels, _fused_kernels),
    *(_too_old_for_gpu, _power, _slowed, _mig, _persistence),
)
