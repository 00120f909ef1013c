"""Choose the platform, ``--hexi-platform {auto,cpu,cuda}``; replace defaults that a CPU cannot have."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.patching import Patch, PatchSet

PLATFORM_FLAG = "--hexi-platform"
PLATFORM_NAMES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Platform:
    """Device and communication backend of a training run.

    Attributes:
        torch_patches: patches of PyTorch; must be applied before Megatron is imported.
    """

    name: str
    device: torch.device
    backend: str
    torch_patches: PatchSet
    megatron_patches: tuple[Patch, ...] = ()

    def install(self) -> None:
        """Replace what the platform needs replaced in PyTorch.

        Raises:
            PatchError: PyTorch does not look as expected, or the platform is installed already.
        """
        self.torch_patches.install()

    def remove(self) -> None:
        """Restore PyTorch exactly as it was."""
        self.torch_patches.remove()


def requested_platform(argv: Sequence[str]) -> str:
    """Return the value of ``--hexi-platform`` in a command line that Megatron has not parsed yet.

    Raises:
        PlatformError: the flag has no value, or one that is not known.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(PLATFORM_FLAG, choices=PLATFORM_NAMES, default="auto")
    try:
        return str(parser.parse_known_args(list(argv))[0].hexi_platform)
    except argparse.ArgumentError as problem:
        raise PlatformError(f"{PLATFORM_FLAG}: {problem.message}; give auto, cpu or cuda") from problem


def select_platform(name: str) -> Platform:
    """Return the platform of a name; ``auto`` is CUDA where there is a GPU and the CPU elsewhere.

    Raises:
        PlatformError: CUDA was asked for and there is none, or the name is not known.
    """
    if name not in PLATFORM_NAMES:
        raise PlatformError(f"{PLATFORM_FLAG} {name}: not a platform; give auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise PlatformError(
            f"{PLATFORM_FLAG} cuda: PyTorch {torch.__version__} sees no GPU on this machine; "
            f"use {PLATFORM_FLAG} cpu, or check the driver and CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" or (name == "auto" and has_gpu):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return Platform("cuda", device, "nccl", PatchSet(()))
    if name == "auto":
        say("no GPU found: running on the CPU with gloo (say --hexi-platform cpu to choose it)")
    from megatron_hexi.platform.cpu import cpu_platform

    return cpu_platform()


#: This process, where it is a rank although `multiprocessing` started it.
_rank_process: int | None = None


def be_a_rank() -> None:
    """Let this process print although `multiprocessing` started it, as it starts ranks of elastic jobs."""
    global _rank_process
    _rank_process = os.getpid()


def say(message: str) -> None:
    """Print a message once: on standard error, from rank 0, and not from its helper processes."""
    is_rank = os.getpid() == _rank_process or multiprocessing.parent_process() is None
    if os.environ.get("RANK", "0") == "0" and is_rank:
        print(f"hexi: {message}", file=sys.stderr, flush=True)


#: dest of the argument, the flag that sets it, what it is on a CPU.
_DEFAULTS = (
    ("distributed_backend", "--distributed-backend", "gloo"),
    ("transformer_impl", "--transformer-impl", "local"),
    ("apply_rope_fusion", "--no-rope-fusion", False),
    ("masked_softmax_fusion", "--no-masked-softmax-fusion", False),
    ("no_persist_layer_norm", "--no-persist-layer-norm", True),
    ("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", False),
)


def adjust_cpu_arguments(args: Namespace, given: set[str]) -> list[str]:
    """Replace the defaults that need a GPU by what a CPU can do; return the flags that were changed.

    Args:
        args: Megatron's parsed arguments; changed in place.
        given: the flags that the user wrote, as written (``"--distributed-backend"``).

    Raises:
        PlatformError: the user asked for a value that needs a GPU.
    """
    changed = []
    for name, flag, value in _DEFAULTS:
        present = getattr(args, name)
        if present == value:
            continue
        if flag in given:
            raise PlatformError(
                f"{flag} {present}: needs a GPU, and --hexi-platform is cpu; leave {flag} out or give {value}"
            )
        setattr(args, name, value)
        changed.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return changed
