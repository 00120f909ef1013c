"""A mixed cluster emulated on one Linux machine: docs/testbed.md. Torch only in `in_rank`, which ranks run.

`hexi testbed` (`command`) starts a lab: a process tree in namespaces of its own (`isolation`) that the kernel
removes with it. In it the `supervisor` builds and measures the links (`network`), runs jobs
(`job`) and holds what was measured against the cluster file (`truth`).
"""
