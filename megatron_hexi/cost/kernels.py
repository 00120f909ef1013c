"""Which attention kernel a job is planned with, on each kind of GPU of a cluster.

A kind without a choice has the kernel that the cluster file gives curves for, or else its fastest in the
catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.kernels import kernel_on, split_kernels

#: Built from source, and not in the shipped image; the others come with torch.
_NOT_IN_IMAGE = "flash-attn-3"


def planned_kernels(text: str | None, cluster: Cluster) -> dict[str, str]:
    """The kernel of each kind of GPU of a cluster, by the GPU's name.

    Raises:
        ClusterError: no curves of a chosen kernel are known for its GPU.
        HexiError: a choice for GPUs that the cluster does not have.
    """
    kinds = _kinds(cluster)
    for gpu in {} if text is None else split_kernels(text):
        if not any(name.startswith(gpu) for name in kinds):
            raise HexiError(
                f"--kernel {text}: no GPU of {cluster.name} is a {gpu}; name one of {', '.join(kinds)}"
            )
    return {name: kind.attention(kernel_on(text, name)).kernel for name, kind in kinds.items()}


def assumed_kernels(text: str | None, cluster: Cluster) -> dict[str, tuple[str, str]]:
    """GPUs whose kernel nobody chose or measured, and the image lacks; it, and the best of the others."""
    found = {}
    for name, kind in _kinds(cluster).items():
        entry = cluster.file.devices.get(name)
        measured = entry is not None and _NOT_IN_IMAGE in (entry.attention or {})
        others = [kernel for kernel in kind.kernels if kernel != _NOT_IN_IMAGE]
        default = kernel_on(text, name) is None and kind.attention().kernel == _NOT_IN_IMAGE
        if default and others and not measured:
            found[name] = _NOT_IN_IMAGE, others[0]
    return found


def shipped_kernels(kernels: Mapping[str, str]) -> dict[str, str]:
    """Return those kernels that the shipped image has, by the GPU's name."""
    return {gpu: kernel for gpu, kernel in kernels.items() if kernel != _NOT_IN_IMAGE}


def _kinds(cluster: Cluster) -> dict[str, Device]:
    return {rank.device.name: rank.device for rank in cluster.ranks}
