"""Plans that follow the ranks' speeds while a job runs: ``--hexi-replan-interval``.

- `training`: measures, and swaps plans between two iterations
- `planning`: a process next to rank 0: measured times -> speeds -> the plan cut again -> whether it pays;
  no torch
- `arguments`: which jobs can be re-planned
"""
