"""Finds the plan: groupings, exact balance, CP-SAT, replicas, baselines, a lower bound. No torch here."""

from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.planner import find_plan
from megatron_hexi.planner.result import Planned

__all__ = ["Baseline", "Bound", "Planned", "find_plan"]
