"""The planner at the start of a round, in a process of its own: ``python -m megatron_hexi.elastic.planning``.

- `__main__`: answers for each set of nodes that may be present
- `survivors`: the plan for the nodes that are present
- `job`: the request to the planner that keeps the job's training as it is
"""
