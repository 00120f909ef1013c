"""Layouts that a user could run without the planner, each the best that its rules allow."""

from megatron_hexi.planner.baselines.find import Baseline, find_baselines, find_faster

__all__ = ["Baseline", "find_baselines", "find_faster"]
