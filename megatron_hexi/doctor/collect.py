"""Collection of all facts about a process and its machine, part by part; a part may fail alone."""

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

from megatron_hexi.doctor import machine, software
from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.errors import HexiError

#: Callback: receives the part being examined, the number of parts done, and their total.
Progress = Callable[[str, int, int], None]

_PARTS: dict[str, Callable[[], Any]] = {
    "packages": software.find_packages,
    "torch": software.find_torch,
    "driver": software.find_driver,
    "gpus": software.find_gpus,
    "gpu_states": machine.find_gpu_states,
    "gpu_links": machine.find_gpu_links,
    "cpu": machine.find_cpu,
    "nccl_plugins": machine.find_nccl_plugins,
    "kernels": software.find_kernels,
    "triton_lacks": software.find_triton,
    "patches": software.find_patches,
    "network": machine.find_network,
    "limits": machine.find_limits,
}


def collect(rank: int | None, checkout: Checkout | None = None, progress: Progress | None = None) -> Facts:
    """Return the facts about this machine and this process."""
    parts: dict[str, Any] = {}
    unknown: list[tuple[str, str]] = []
    for done, (name, find) in enumerate(_PARTS.items()):
        if progress is not None:
            progress(f"looking at {name}", done, len(_PARTS))
        try:
            with _quiet(), _uncompiled():
                parts[name] = find()
        except Exception as problem:  # whatever a broken installation raises is a finding
            line = (str(problem).strip() or "no message").splitlines()[0]
            kind = "" if isinstance(problem, HexiError) else f"{type(problem).__name__}: "
            unknown.append((name, f"{kind}{line}"))
    return Facts(
        host=socket.gethostname(),
        rank=rank,
        python=platform.python_version(),
        executable=sys.executable,
        checkout=checkout,
        environment=machine.find_environment(os.environ),
        unknown=tuple(unknown),
        **parts,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what libraries print at import: rules report what matters of it."""
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
    """Skip torch's compiler at import, which takes as long as all the rest; nothing is run here.

    Megatron and our attention layer mark functions for compilation at import.
    """
    try:
        import torch
    except Exception:  # `find_packages` reports it
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
