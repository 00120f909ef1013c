"""The attention kernels that a machine would use, and why not others."""

from __future__ import annotations

from megatron_hexi.doctor.facts import KernelChoice

#: Common head sizes; others behave as the next larger one of these.
_HEAD_DIMS = (64, 128, 256)


def find_kernels() -> tuple[KernelChoice, ...]:
    """Return the choices of ``--hexi-kernel auto`` for each kind of GPU, or for the CPU without GPUs.

    Raises:
        ImportError: torch cannot be imported.
    """
    import torch

    from megatron_hexi.runtime.kernels import ranked_kernels, select_kernel

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    devices = {"cpu": torch.device("cpu")}
    if torch.cuda.is_available():
        # One GPU of each kind: a node may mix them.
        every = range(torch.cuda.device_count())
        devices = {
            torch.cuda.get_device_name(index): torch.device("cuda", index) for index in reversed(every)
        }
    choices = []
    for name, device in reversed(devices.items()):
        for dtype_name, dtype in dtypes.items():
            for head_dim in _HEAD_DIMS:
                chosen = select_kernel("auto", device, dtype, head_dim).name
                ranked = ranked_kernels(device)
                verdicts = tuple((k.name, k.refuses(device, dtype, head_dim) or "") for k in ranked)
                choices.append(KernelChoice(name, dtype_name, head_dim, chosen, verdicts))
    return tuple(choices)


def find_triton() -> str:
    """Return what keeps Triton from launching kernels beside attention; empty if nothing does.

    Raises:
        ImportError: torch cannot be imported.
    """
    from megatron_hexi.runtime.fused.toolchain import triton_lacks

    return triton_lacks()
