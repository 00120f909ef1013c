"""Check for the tools that Triton needs to launch a kernel, since it compiles a small C module on first use.

The conditions are those of `triton/runtime/build.py`.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def triton_lacks() -> str:
    """Return the reason why Triton cannot launch kernels on a GPU; empty if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "Triton finds no C compiler: CC is not set, and there is neither gcc nor clang"
    if shutil.which(compiler.split()[0]) is None:
        return f"Triton finds no C compiler: there is no CC={compiler}"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(headers, "Python.h").is_file():
        return f"Triton finds no Python.h in {headers}"
    return ""
