"""A time that no layout can beat, found independently of the search."""

from megatron_hexi.planner.bound.bound import Bound, joint_bound, memory_fits

__all__ = ["Bound", "joint_bound", "memory_fits"]
