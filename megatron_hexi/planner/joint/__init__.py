"""The joint search: replicas, pipelines, stages and domains, chosen together.

`pools`: equal nodes, and a stage's number of GPUs from each pool. `layer_times`, `stage_tables`: a stage's
time by its number of layers. `blocks`, `pipes`, `pipeline_search`: the best pipelines on some GPUs.
`synchronisation`, `replica_columns`: candidate replicas. `packing`: the replicas that together are fastest.
`placing`, `assembly`: GPUs for them, and the plan. `joint_search`: the whole search for one size of
micro-batches; `searches`: for all sizes.
"""

from megatron_hexi.planner.joint.searches import JointSearches
from megatron_hexi.planner.joint.stage_tables import DEEPEST
from megatron_hexi.planner.layouts.trial import Candidate

__all__ = ["DEEPEST", "Candidate", "JointSearches"]
