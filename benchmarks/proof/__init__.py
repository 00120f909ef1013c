"""A lower bound of the iteration time over all layouts by a linear program, tighter than sums."""

from benchmarks.proof.bound import joint_bound, memory_fits

__all__ = ["joint_bound", "memory_fits"]
