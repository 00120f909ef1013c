"""Everything that a single GPU can measure, as one unattended command: ``python -m benchmarks.one_gpu``."""
