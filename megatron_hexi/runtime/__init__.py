"""Carry out a plan with torch.distributed: attention, messages between stages, buckets of weights.

Start reading at `attention`.
"""

from megatron_hexi.runtime.agreement import NO_PLAN, agree_on_plan, job_store, meeting, tell_problem
from megatron_hexi.runtime.attention import DomainAttention
from megatron_hexi.runtime.kernels import KERNEL_NAMES, select_kernel
from megatron_hexi.runtime.watch import start_watch, stop_watch

__all__ = [
    "KERNEL_NAMES",
    "NO_PLAN",
    "DomainAttention",
    "agree_on_plan",
    "job_store",
    "meeting",
    "select_kernel",
    "start_watch",
    "stop_watch",
    "tell_problem",
]
