"""The joint search: replicas, pipelines, stages and domains, chosen together.

`pools`: nodes that are alike, and what a stage takes of them. `layer_times`, `stage_tables`: a stage's time
by its layers. `blocks`, `pipes`, `pipeline_search`: the best pipelines on some GPUs. `synchronisation`,
`replica_columns`: what replicas may be. `packing`: replicas that share the fleet. `placing`, `assembly`: GPUs
for them, and the plan. `joint_search`: all of it for one size of micro-batches; `searches`: for all sizes.
"""

from megatron_hexi.planner.joint.searches import JointSearches
from megatron_hexi.planner.joint.stage_tables import DEEPEST
from megatron_hexi.planner.layouts.trial import Candidate

__all__ = ["DEEPEST", "Candidate", "JointSearches"]
