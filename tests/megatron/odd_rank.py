"""Our entry point with something wrong on one rank alone, or on all.

The first two arguments are for it: which rank (or ``all``), and what.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise HexiError("nothing of the kind is here; give another")


def go_wrong(what: str) -> None:
    from megatron_hexi.megatron import groups, kernel_choice

    match what:
        case "plan":
            sys.argv[sys.argv.index("--hexi-plan") + 1] = "elsewhere.yaml"
        case "no plan":
            at = sys.argv.index("--hexi-plan")
            del sys.argv[at : at + 2]
        case "kernel":
            kernel_choice.select_kernel = _refuse  # type: ignore[attr-defined]
        case "session":
            groups.start_session = _refuse
        case "bound device":
            dist.init_process_group("gloo")
            dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)


def main() -> None:
    """Train."""
    who, what = sys.argv[1:3]
    del sys.argv[1:3]
    from megatron_hexi import pretrain_gpt

    if who in ("all", os.environ["RANK"]):
        go_wrong(what)
    pretrain_gpt.main()
