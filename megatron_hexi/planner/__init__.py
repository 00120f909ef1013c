"""Finds the plan: groupings, exact balance, CP-SAT, replicas, baselines, a lower bound. No torch here.

`fleet`: the units that a plan is made of, what each can do and has room for, and which are used at all.
`layouts`: plans as a search moves them, and how they are timed.
`search`: one domain's best grouping, balanced and polished; and replicas.
`tuning`: small changes of whole layouts, and CP-SAT.
`baselines`: what else could be run. `bound`: a time that no plan can beat, which does not know the search.

`planner` puts them together, in a `budget`; `advice` says what to do where nothing fits.
"""

from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.planner import find_plan
from megatron_hexi.planner.result import Planned

__all__ = ["Baseline", "Bound", "Planned", "find_plan"]
