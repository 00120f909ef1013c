"""The attention kernel of a rank: the plan's, unless the command line chooses another."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError, Namespace

import torch

from megatron_hexi.errors import HexiError, PlanError, PlatformError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import is_same_kernel, kernel_by_torch, split_kernels
from megatron_hexi.runtime.kernels import KERNEL_NAMES, KernelDispatch, select_kernel

_AUTO = "auto"


def kernel_choice(text: str) -> str:
    """Return a value of ``--hexi-kernel``, checked: a name, or a name for each kind of GPU.

    Raises:
        ArgumentTypeError: a name is unknown, or a part is no ``GPU=NAME``.
    """
    try:
        unknown = set(split_kernels(text).values()).difference(KERNEL_NAMES)
    except HexiError as problem:
        raise ArgumentTypeError(str(problem)) from None
    if unknown:
        raise ArgumentTypeError(f"no kernel is called {min(unknown)}; choose from {', '.join(KERNEL_NAMES)}")
    return text


def choose_kernel(args: Namespace, plan: Plan, device: torch.device, dtype: torch.dtype) -> KernelDispatch:
    """Return the attention kernel of this rank.

    Raises:
        PlanError: the command line has another kernel for this GPU than the plan; the message has both.
        PlatformError: the kernel of the command line refuses the device or the tensors.
    """
    widest = max(plan.workload.head_dim, plan.workload.value_size)
    by_kind = split_kernels(args.hexi_kernel)
    named = bool(plan.job.kernel) or "" not in by_kind
    gpu = torch.cuda.get_device_name(device) if named and device.type == "cuda" else ""
    requested = kernel_by_torch(by_kind, gpu) or _AUTO
    planned = kernel_by_torch(plan.job.kernel or {}, gpu)
    if planned is None:
        return select_kernel(requested, device, dtype, widest)
    if requested != _AUTO:
        if not is_same_kernel(requested, planned):
            raise PlanError(
                f"{args.hexi_plan}: job.kernel is {planned} for {gpu}, the command line has {requested}; "
                f"leave --hexi-kernel out, or make a plan for it: hexi plan --kernel {requested}"
            )
        return select_kernel(requested, device, dtype, widest)
    try:
        return select_kernel(planned, device, dtype, widest)
    except PlatformError as problem:
        kernel = select_kernel(_AUTO, device, dtype, widest)
        # Once a node, whose GPUs are alike: rank 0 may be on one that has the plan's kernel.
        if not is_same_kernel(kernel.name, planned) and os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"hexi: warning: {args.hexi_plan}: job.kernel is {planned} for {gpu}, this rank uses "
                f"{kernel.name} ({problem}); predicted times do not hold: plan with --kernel {kernel.name}",
                file=sys.stderr,
                flush=True,
            )
        return kernel
