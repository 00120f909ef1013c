"""The planner at the start of a round, in a process of its own: ``python -m megatron_hexi.elastic.planning``.

- `__main__`: answers for each set of nodes that may be present
- `survivors`: the plan for the nodes that are present
- `node`: the node of the cluster file that a host of the job is
- `job`: the request to the planner that keeps the job's training as it is
"""
