"""The plan of a job as data classes, with its layout, split tables, checks and file format; without torch."""

from megatron_hexi.plan.blocks import Block, Mask, Shape
from megatron_hexi.plan.check import require_repeated
from megatron_hexi.plan.file import (
    dump_plan,
    plan_dict,
    plan_digest,
    plan_from_yaml,
    read_plan,
    validate_plan,
    write_plan,
)
from megatron_hexi.plan.model import Domain, Exchange, Group, Member, Plan, Replica, Stage
from megatron_hexi.plan.proportion import check_speeds, proportional_domain, proportional_plan
from megatron_hexi.plan.schedule import ExchangeStep, Schedule, Schedules, Transfer, build_schedule
from megatron_hexi.plan.shares import Share, assign_micro_batches, has_equal_replicas
from megatron_hexi.plan.terms import Estimate, JobTerms, Provenance, UnitRates
from megatron_hexi.plan.traffic import LayerTraffic, Traffic, attention_traffic
from megatron_hexi.plan.units import unit_ranks
from megatron_hexi.plan.workload import LatentColumns, Workload

__all__ = [
    "Block",
    "Domain",
    "Estimate",
    "Exchange",
    "ExchangeStep",
    "Group",
    "JobTerms",
    "LatentColumns",
    "LayerTraffic",
    "Mask",
    "Member",
    "Plan",
    "Provenance",
    "Replica",
    "Schedule",
    "Schedules",
    "Shape",
    "Share",
    "Stage",
    "Traffic",
    "Transfer",
    "UnitRates",
    "Workload",
    "assign_micro_batches",
    "attention_traffic",
    "build_schedule",
    "check_speeds",
    "dump_plan",
    "has_equal_replicas",
    "plan_dict",
    "plan_digest",
    "plan_from_yaml",
    "proportional_domain",
    "proportional_plan",
    "read_plan",
    "require_repeated",
    "unit_ranks",
    "validate_plan",
    "write_plan",
]
