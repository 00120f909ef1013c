"""A lower bound of the iteration time over all layouts, computed independently of the search."""

from megatron_hexi.planner.bound.bound import Bound, joint_bound, memory_fits

__all__ = ["Bound", "joint_bound", "memory_fits"]
