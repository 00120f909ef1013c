"""The planner's part in re-planning. It runs in a separate process next to rank 0 (`advisor`)."""
