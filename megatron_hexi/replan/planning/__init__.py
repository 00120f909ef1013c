"""The planner's part in re-planning. It runs as a process of its own next to rank 0 (`advisor`)."""
