"""Measures a real cluster under torchrun or srun, and writes the cluster file that the planner reads.

What to measure is plain data (`document`), and so is what becomes of it (`nodes`, `merge`, `network`,
`assemble`). Measuring needs torch: `world` (the ranks), `device` and `compute`, which `stages` calls in
order. `document` is what lies between, and what an interrupted probe goes on from; `run` leads through it.
"""
