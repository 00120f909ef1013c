"""What one would do without a planner: each baseline laid out as well as its own rules allow."""

from megatron_hexi.planner.baselines.find import Baseline, find_baselines, find_faster

__all__ = ["Baseline", "find_baselines", "find_faster"]
