"""A time that no plan can beat (`bound`).

`pieces`: what one group has on one site, each at its best, priced so that they add up.
`groups`: the least that a whole group takes, by itself.
`waiting`: the least in which given groups, which wait for each other, hold the sequence.
`packings`: which groups the units can form at once; with the search it shares what that may have missed.

Each room knows those above it only. Over all of them, whole replicas are looked at where there can be few
(`replica_choices`, `replicas`).
"""

from megatron_hexi.planner.bound.bound import Bound, LowerBound

__all__ = ["Bound", "LowerBound"]
