"""Rules about GPUs: their driver and settings, and the kernels that run on them."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts, Gpu, Torch
from megatron_hexi.doctor.findings import Problem, error, note, warning
from megatron_hexi.whole_number import whole_number

#: The oldest driver branch for each major version of CUDA on data-centre GPUs, by CUDA's minor version
#: compatibility: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}


def _no_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.gpus or facts.torch is None:
        return
    driver, built = facts.driver, facts.torch.cuda
    if driver.version is None and driver.cuda is None:
        yield note(
            "no GPU: training runs on the CPU, with gloo", "nothing if intended; otherwise install the driver"
        )
        return
    summary = f"an NVIDIA driver is here ({driver.version or 'its library alone'}), and torch sees no GPU"
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if built is None:
        yield error(
            f"{summary}: torch {facts.package('torch').version} is built without CUDA",
            "install a torch with CUDA, or run in the container (docs/docker.md)",
        )
    elif visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        yield error(
            f"{summary}: CUDA_VISIBLE_DEVICES={visible!r} hides all of them", "unset CUDA_VISIBLE_DEVICES"
        )
    elif driver.cuda is not None and Version(driver.cuda).major < Version(built).major:
        yield error(
            f"{summary}: the driver goes up to CUDA {driver.cuda}, torch is built for {built}",
            _newer_driver(built),
        )
    else:
        yield error(
            summary, "see what nvidia-smi says; a container needs --gpus all, a SLURM step --gpus-per-node"
        )


def _newer_driver(cuda: str) -> str:
    branch = _DRIVER_OF_CUDA.get(Version(cuda).major)
    least = "a newer driver" if branch is None else f"driver {branch} or newer"
    return f"install {least}, or a torch built for an older CUDA"


def _no_code_for_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.torch is None:
        return
    kinds = {gpu.name: gpu for gpu in facts.gpus}
    for gpu in kinds.values():
        major, minor = gpu.capability
        if not _has_code(facts.torch, gpu):
            yield error(
                f"torch has no code for {gpu.name} (compute capability {major}.{minor}), "
                f"only for {', '.join(facts.torch.architectures) or 'none'}",
                "install a torch that was built for it",
            )


def _has_code(torch: Torch, gpu: Gpu) -> bool:
    """Whether torch runs on a GPU: machine code of its major version, or an intermediate form."""
    major, minor = gpu.capability
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
    yield warning(
        f"{facts.triton_lacks}: copies and sums around attention run in plain torch, in more launches", remedy
    )


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
