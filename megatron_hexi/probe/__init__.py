"""Measures a real cluster under torchrun or srun, and writes the cluster file that the planner reads.

What to measure is plain data (`sizes`), and so is what becomes of it (`nodes`, `merge`, `network_fit`,
`network`, `assemble`). Measuring needs torch: `world` (the ranks), `device`, `clock`, `compute`, `links`,
which `stages` calls in order. `document` is what lies between, and what an interrupted probe goes on from;
`run` leads through it.
"""
