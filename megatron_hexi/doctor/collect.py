"""All that a process can find out, part by part; a part that fails leaves the others standing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.doctor import gpu_state, kernel_choice, machine, patch_state, software
from megatron_hexi.doctor.facts import Checkout, Facts

#: Told what is looked at, how many parts are done, and how many there are.
Progress = Callable[[str, int, int], None]

_PARTS: dict[str, Callable[[], Any]] = {
    "packages": software.find_packages,
    "torch": software.find_torch,
    "driver": software.find_driver,
    "gpus": software.find_gpus,
    "gpu_states": gpu_state.find_gpu_states,
    "cpu": machine.find_cpu,
    "nccl_plugins": machine.find_nccl_plugins,
    "kernels": kernel_choice.find_kernels,
    "triton_lacks": kernel_choice.find_triton,
    "patches": patch_state.find_patches,
    "network": machine.find_network,
    "limits": machine.find_limits,
}


def collect(rank: int | None, checkout: Checkout | None = None, progress: Progress | None = None) -> Facts:
    """Look at this machine and this process.

    Args:
        rank: this process's number in the job; ``None`` without a launcher.
        checkout: what was found out about a Megatron-LM checkout.
        progress: told what is looked at.
    """
    found: dict[str, Any] = {}
    unknown: list[tuple[str, str]] = []
    for done, (name, find) in enumerate(_PARTS.items()):
        if progress is not None:
            progress(f"looking at {name}", done, len(_PARTS))
        try:
            with _quiet(), _uncompiled():
                found[name] = find()
        except Exception as problem:  # whatever a broken installation raises is a finding
            said = (str(problem).strip() or "no message").splitlines()[0]
            unknown.append((name, f"{type(problem).__name__}: {said}"))
    return Facts(
        host=socket.gethostname(),
        rank=rank,
        python=platform.python_version(),
        executable=sys.executable,
        checkout=checkout,
        environment=machine.find_environment(os.environ),
        unknown=tuple(unknown),
        **found,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries say at import out of the report: what matters of it is a rule of ours."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Leave out what torch imports to compile: as much as all the rest, and nothing is run here.

    Megatron and our attention layer say at import which functions are compiled, and which are not.
    """
    try:
        import torch
    except Exception:  # `find_packages` says why
        yield
        return
    compiled, disabled = torch.compile, torch.compiler.disable
    setattr(torch, "compile", _as_it_is)  # noqa: B010 (mypy would ask for the same overloads)
    setattr(torch.compiler, "disable", _as_it_is)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "compile", compiled)  # noqa: B010
        setattr(torch.compiler, "disable", disabled)  # noqa: B010


def _as_it_is(function: Any = None, *_: Any, **options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated
