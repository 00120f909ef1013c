"""Experiments without a mixed cluster: simulator, scenarios and testbed. Only the command line imports it.

`simulator` replays a plan event by event, `scenario` simulates days of a job on a changing cluster, and
`testbed` emulates a cluster on one machine. Each has its own tables and pictures.
"""
