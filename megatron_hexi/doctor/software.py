"""Facts about software: packages, torch, driver, attention kernels, and whether our patches fit."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from megatron_hexi.doctor.facts import Driver, Gpu, KernelChoice, Package, PatchState, Torch
from megatron_hexi.errors import PatchError
from megatron_hexi.patching import Patch, distribution_version

_OURS = "megatron-hexi"

#: Packages of a job: `Package.name`, the names of its distribution, and the module to import. Only an import
#: shows a library that was built against another torch.
_IMPORTED: dict[str, tuple[tuple[str, ...], str]] = {
    "torch": (("torch",), "torch"),
    "megatron-core": (("megatron-core",), "megatron.core"),
    "transformer-engine": (("transformer-engine", "transformer-engine-torch"), "transformer_engine.pytorch"),
    "apex": (("apex",), "apex"),
    "flash-attn": (("flash-attn",), "flash_attn.flash_attn_interface"),
    "flash-attn-3": (("flash-attn-3", "flash-attn-interface"), "flash_attn_interface"),
    "triton": (("triton",), "triton"),
    "flash-linear-attention": (("flash-linear-attention", "fla-core"), "fla"),
    "tilelang": (("tilelang",), "tilelang"),
    "mamba-ssm": (("mamba-ssm",), "mamba_ssm.ops.triton.ssd_combined"),
    "causal-conv1d": (("causal-conv1d",), "causal_conv1d"),
    "tensorboard": (("tensorboard",), "tensorboard"),
    "ortools": (("ortools",), "ortools.sat.python.cp_model"),
}

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def find_packages() -> tuple[Package, ...]:
    """Return the packages that megatron-hexi needs or can use, itself first."""
    needed = _needs()
    further = [name for name in needed if name not in _IMPORTED]
    return (
        Package(_OURS, distribution_version(_OURS)),
        *(_imported(name, needed.get(name)) for name in _IMPORTED),
        *(Package(name, distribution_version(name), needed[name]) for name in further),
    )


def find_torch() -> Torch | None:
    """Return the build of torch; ``None`` where it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):
        return None  # `find_packages` reports it
    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with contextlib.suppress(RuntimeError, AttributeError):
            nccl = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    cudnn, folder = None, ""
    if torch.backends.cudnn.is_available():
        from megatron_hexi.runtime.kernels.aten import UNKNOWN_FOLDER, cudnn_version, torchs_cudnn

        cudnn = cudnn_version()
        folder = "" if cudnn is not None else torchs_cudnn() or UNKNOWN_FOLDER
    return Torch(
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        nccl=nccl,
        architectures=tuple(torch.cuda.get_arch_list()),
        cudnn_folder=folder,
    )


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, without allocating memory on them."""
    try:
        import torch
    except (ImportError, OSError):
        return ()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(
        Gpu(gpu.name, (gpu.major, gpu.minor), round(gpu.total_memory / 2**30, 1))
        for gpu in map(torch.cuda.get_device_properties, range(count))
    )


def find_driver(file: Path = _DRIVER_FILE) -> Driver:
    """Return the versions of NVIDIA's driver, without torch, which an old driver may stop from starting."""
    module = None
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", file.read_text())
        module = match[1] if match else None
    return Driver(module, _driver_cuda())


def _driver_cuda() -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _needs() -> dict[str, str]:
    """Return names and version ranges of our requirements, to plan and to train."""
    try:
        lines = requires(_OURS) or []
    except PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {
        requirement.name: str(requirement.specifier)
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("plan", "train"))
    }


def _imported(name: str, needs: str | None) -> Package:
    distributions, module_name = _IMPORTED[name]
    installed = next(filter(None, map(distribution_version, distributions)), None)
    if not _is_there(module_name):
        return Package(name, None, needs)
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:  # a library built for another torch fails in ways of its own
        if isinstance(problem, ModuleNotFoundError) and problem.name == module_name:
            return Package(name, None, needs)  # another package lies in a folder of that name
        line = (str(problem).strip() or "no message").splitlines()[0]
        return Package(name, installed or "unknown", needs, f"{type(problem).__name__}: {line}")
    file = getattr(module, "__file__", None)
    location = None if file is None else str(Path(file).parent)
    return Package(name, _own_version(module) or installed or "unknown", needs, location=location)


def _is_there(module_name: str) -> bool:
    # The package alone: looking a submodule up would import it.
    try:
        return importlib.util.find_spec(module_name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _own_version(module: ModuleType) -> str | None:
    """Return a module's own version: a checkout on the path comes before an installed wheel."""
    stated = getattr(module, "__version__", None)
    if stated is None:
        return None
    if module.__name__ == "megatron.core":
        # It adds the git commit of the job's working folder, which is not Megatron's.
        with contextlib.suppress(InvalidVersion):
            return Version(str(stated)).public
    return str(stated)


#: Common head sizes; others behave as the next larger one of these.
_HEAD_DIMS = (64, 128, 256)


def find_kernels() -> tuple[KernelChoice, ...]:
    """Return the choices of ``--hexi-kernel auto`` for each kind of GPU, or for the CPU without GPUs.

    Raises:
        ImportError: torch cannot be imported.
    """
    import torch

    from megatron_hexi.runtime.kernels import ranked_kernels, select_kernel

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    devices = {"cpu": torch.device("cpu")}
    if torch.cuda.is_available():
        # One GPU of each kind: a node may mix them.
        every = reversed(range(torch.cuda.device_count()))
        devices = {torch.cuda.get_device_name(index): torch.device("cuda", index) for index in every}
    choices = []
    for name, device in reversed(devices.items()):
        ranked = ranked_kernels(device)
        for (dtype_name, dtype), head_dim in itertools.product(dtypes.items(), _HEAD_DIMS):
            chosen = select_kernel("auto", device, dtype, head_dim).name
            verdicts = tuple((k.name, k.refuses(device, dtype, head_dim) or "") for k in ranked)
            choices.append(KernelChoice(name, dtype_name, head_dim, chosen, verdicts))
    return tuple(choices)


def find_triton() -> str:
    """Return what keeps Triton from launching kernels beside attention; empty if nothing does.

    Raises:
        ImportError: torch cannot be imported.
    """
    from megatron_hexi.runtime.fused.toolchain import triton_lacks

    return triton_lacks()


def find_patches() -> tuple[PatchState, ...]:
    """Return the state of every patch of Megatron that training would apply here; none is applied.

    Empty where Megatron is not installed.

    Raises:
        ImportError: torch or Megatron is installed and cannot be imported.
    """
    if importlib.util.find_spec("megatron") is None:
        return ()
    import torch

    from megatron_hexi.patch_list import all_patches
    from megatron_hexi.platform import select_platform

    platform = select_platform("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(map(patch_state, all_patches(platform)))


def patch_state(patch: Patch) -> PatchState:
    """Return whether a patch can be applied."""
    if not patch.wanted():
        return PatchState(patch.target, patch.why, "not needed")
    try:
        patch.locate()
    except PatchError as problem:
        return PatchState(patch.target, patch.why, "does not fit", str(problem))
    return PatchState(patch.target, patch.why, "fits")
