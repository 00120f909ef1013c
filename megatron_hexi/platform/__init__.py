"""The platform of a training run: CUDA unchanged, or the CPU with gloo.

`select_platform(name)` gives the `Platform`; `install()` puts on what the platform replaces (nothing on
CUDA) and `remove()` takes it off. `requested_platform(argv)` reads the one flag that must be known before
Megatron is imported. `adjust_cpu_arguments` turns off the defaults of Megatron that need a GPU.
"""

from megatron_hexi.platform.select import Platform, adjust_cpu_arguments, requested_platform, select_platform

__all__ = ["Platform", "adjust_cpu_arguments", "requested_platform", "select_platform"]
