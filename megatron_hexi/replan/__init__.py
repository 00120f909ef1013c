"""Re-planning while a job runs: what ranks measured -> rates -> the plan cut anew -> whether it is worth it.

The half that plans. It runs as a process of its own beside rank 0 (`advisor`); the training half, which
measures and swaps, is `megatron.replanning`. No torch here.
"""
