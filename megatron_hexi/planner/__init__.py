"""Finds the plan: replicas, pipelines, domains, a lower bound, and baselines. No torch here.

`request`: a planning request. `fleet`: the units that a plan is made of, their rates and their memory.
`layouts`: domains in the form that a search changes, and their timing. `search`: the best grouping of one
domain, balanced and polished. `moves`: moves of a plan, and the climb that tries them.
`joint`: the search over replicas, stages and domains. `improve`: what is climbed from.
`baselines`: layouts that a user could run without the planner. `bound`: a lower bound of an iteration's
seconds over all layouts, computed without the search.

`planner` puts them together; `advice` proposes changes of a request that no plan fits.
"""

from megatron_hexi.planner.ablation import FeatureAblation, WeakKind, ablate_features, weak_kinds
from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.longest import longest_in_layout
from megatron_hexi.planner.moves.edit import plan_of_whole
from megatron_hexi.planner.planner import check_depth, find_plan, longest_request
from megatron_hexi.planner.request import CHOSEN, Request
from megatron_hexi.planner.result import Planned

__all__ = [
    "CHOSEN",
    "Baseline",
    "Bound",
    "FeatureAblation",
    "Planned",
    "Request",
    "WeakKind",
    "ablate_features",
    "check_depth",
    "find_plan",
    "longest_in_layout",
    "longest_request",
    "plan_of_whole",
    "weak_kinds",
]
