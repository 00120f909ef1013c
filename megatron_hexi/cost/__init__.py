"""Predictions of time and memory: compute, network, memory, iteration. No torch here."""

from megatron_hexi.cost.ceiling import attention_seconds, ceiling_tokens_per_s, token_seconds
from megatron_hexi.cost.fit import Shortage, find_shortage
from megatron_hexi.cost.hosts import Hosts, NodeLoad
from megatron_hexi.cost.iteration import CostModel, IterationCost, estimate
from megatron_hexi.cost.job import PRECISIONS, RECOMPUTES, Job, job_of_plan, job_terms
from megatron_hexi.cost.job_check import check_job
from megatron_hexi.cost.kernels import assumed_kernels, planned_kernels, shipped_kernels
from megatron_hexi.cost.megatron_arguments import ArgumentTerms, model_flags
from megatron_hexi.cost.memory_terms import Memory
from megatron_hexi.cost.model import Model
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.planned_kinds import refuse_imbalance
from megatron_hexi.cost.presets import (
    argument_words,
    check_options,
    constant_flags,
    constant_notes,
    model_file,
    presets,
    read_model,
    read_terms,
    reading_notes,
)
from megatron_hexi.cost.ranks import Pace, RankCost
from megatron_hexi.cost.recipes import Recipe, recipes
from megatron_hexi.cost.throughput import Throughput, model_flops
from megatron_hexi.cost.timing import Timing
from megatron_hexi.cost.unit_rates import unit_rates
from megatron_hexi.errors import NoFlagError

__all__ = [
    "PRECISIONS",
    "RECOMPUTES",
    "ArgumentTerms",
    "CostModel",
    "Hosts",
    "IterationCost",
    "Job",
    "Memory",
    "Model",
    "NoFlagError",
    "NodeLoad",
    "Pace",
    "Phases",
    "RankCost",
    "Recipe",
    "Shortage",
    "Throughput",
    "Timing",
    "argument_words",
    "assumed_kernels",
    "attention_seconds",
    "ceiling_tokens_per_s",
    "check_job",
    "check_options",
    "constant_flags",
    "constant_notes",
    "estimate",
    "find_shortage",
    "job_of_plan",
    "job_terms",
    "model_file",
    "model_flags",
    "model_flops",
    "planned_kernels",
    "presets",
    "read_model",
    "read_terms",
    "reading_notes",
    "recipes",
    "refuse_imbalance",
    "shipped_kernels",
    "token_seconds",
    "unit_rates",
]
