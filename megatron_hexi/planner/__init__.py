"""Finds the plan: replicas, pipelines, domains, a lower bound, and baselines. No torch here.

`request`: what is asked for. `fleet`: the units that a plan is made of, what each can do and has room for.
`layouts`: domains as a search moves them, and how they are timed. `search`: one domain's best grouping,
balanced and polished, and CP-SAT on it. `joint`: everything together. `baselines`: what else could be run.
`bound`: a time that no layout can beat, which does not know the search.

`planner` puts them together; `advice` says what to do where nothing fits.
"""

from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.gains import Gain, find_gains
from megatron_hexi.planner.planner import find_plan
from megatron_hexi.planner.request import CHOSEN, Request
from megatron_hexi.planner.result import Planned

__all__ = ["CHOSEN", "Baseline", "Bound", "Gain", "Planned", "Request", "find_gains", "find_plan"]
