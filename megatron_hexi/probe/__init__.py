"""Measures a real cluster under torchrun or srun, and writes the cluster file that the planner reads.

What to measure is plain data (`sizes`, `rounds`), and so is what becomes of it (`nodes`, `merge`, `fit`,
`network`, `assemble`, `file`). Measuring needs torch: `world` (the ranks), `device`, `clock`, `compute`,
`links`, which `stages` calls in order. `document` is what lies between, and what an interrupted probe goes
on from; `run` leads through it.
"""
