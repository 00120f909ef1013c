"""A time that no layout can beat; it does not know the search, so that no plan is its own proof."""

from megatron_hexi.planner.bound.bound import Bound, joint_bound, memory_fits

__all__ = ["Bound", "joint_bound", "memory_fits"]
