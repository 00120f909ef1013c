"""A time that no plan can beat.

By pieces: what one group has on one site, each at its best, priced so that they add up (`bound`, `demand`;
`piece`, `load`, `filling`, `prices`, `gradients`).
By whole groups, where units can form few shapes of them (`packing`, `worth`; `group_rates` at first, then
`columns`, `site_times`, `inside`, `group_memory`), one inside the other (`nested`, `nested_worth`), and where
few packings are left, by groups that wait for each other (`wholly`, `whole`, `beside`, `together`; `setting`,
`group_lines`, `rows`, `pass_rows`, `key_times`, `arrivals`); these also tell the search what it may have
missed (`placing`).
By whole replicas, where these can have few (`replicas`).
"""

from megatron_hexi.planner.bound.bound import Bound, LowerBound

__all__ = ["Bound", "LowerBound"]
