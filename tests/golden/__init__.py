"""Golden values: what plans, timings, the planner and small trainings give, kept as files beside this one.

A change that should change nothing shows equal values: `python -m tests.golden`. One that should, says so in
its commit and writes them anew: `python -m tests.golden --write`.
"""
