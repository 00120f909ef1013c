"""Trying things out without a mixed cluster. Only the command line imports it.

`simulator` replays a plan event by event, `scenario` days of a job on a cluster that changes, and `testbed`
emulates a cluster on one machine. Each has its tables and pictures beside it.
"""
