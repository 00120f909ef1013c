"""Predictions of time and memory: compute, network, memory, iteration. No torch here."""

from megatron_hexi.cost.ceiling import attention_seconds, ceiling_tokens_per_s, token_seconds
from megatron_hexi.cost.fit import Shortage, find_shortage
from megatron_hexi.cost.hosts import HostMemoryUse, Hosts
from megatron_hexi.cost.iteration import CostModel, IterationCost, estimate
from megatron_hexi.cost.job_check import check_job
from megatron_hexi.cost.kernels import assumed_kernels, planned_kernels, shipped_kernels
from megatron_hexi.cost.memory_terms import Memory
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.ranks import Pace, RankCost
from megatron_hexi.cost.throughput import Throughput, model_flops
from megatron_hexi.cost.timing import Timing
from megatron_hexi.cost.unit_rates import unit_rates

__all__ = [
    "CostModel",
    "HostMemoryUse",
    "Hosts",
    "IterationCost",
    "Memory",
    "Pace",
    "Phases",
    "RankCost",
    "Shortage",
    "Throughput",
    "Timing",
    "assumed_kernels",
    "attention_seconds",
    "ceiling_tokens_per_s",
    "check_job",
    "estimate",
    "find_shortage",
    "model_flops",
    "planned_kernels",
    "shipped_kernels",
    "token_seconds",
    "unit_rates",
]
