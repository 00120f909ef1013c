"""The attention kernel with which a job is planned, for each model of GPU of a cluster.

If the user chooses none for a model, it is the kernel that the cluster file gives curves for, or else the
fastest in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.terms import WIDEST_HEADS, kernel_on, split_kernels

#: A kernel that is built from source and not in the shipped image; the other kernels come with torch.
_NOT_IN_IMAGE = "flash-attn-3"


def planned_kernels(text: str | None, cluster: Cluster) -> dict[str, str]:
    """Return the kernel of each model of GPU of a cluster, by the model's name.

    Args:
        text: the value of ``--kernel``; ``None``: the user chose none.

    Raises:
        ClusterError: no curves of a chosen kernel are known for its GPU.
        HexiError: a kernel is chosen for GPUs that the cluster does not have.
    """
    kinds = _kinds(cluster)
    for gpu in {} if text is None else split_kernels(text):
        if not any(name.startswith(gpu) for name in kinds):
            raise HexiError(
                f"--kernel {text}: no GPU of {cluster.name} is a {gpu}; name one of {', '.join(kinds)}"
            )
    return {name: kind.attention(kernel_on(text, name)).kernel for name, kind in kinds.items()}


def assumed_kernels(text: str | None, cluster: Cluster, head_dim: int) -> dict[str, tuple[str, str]]:
    """Return the models of GPU whose planned kernel was neither chosen nor measured and is not in the image.

    The values are that kernel, and the fastest kernel of the image that takes such heads, by model.

    Args:
        head_dim: columns of a head, the larger number of its key and its value.
    """
    found = {}
    for name, kind in _kinds(cluster).items():
        entry = cluster.file.devices.get(name)
        measured = entry is not None and _NOT_IN_IMAGE in (entry.attention or {})
        shipped = [kernel for kernel in kind.kernels if kernel != _NOT_IN_IMAGE]
        others = [kernel for kernel in shipped if head_dim <= WIDEST_HEADS.get(kernel, head_dim)]
        default = kernel_on(text, name) is None and kind.attention().kernel == _NOT_IN_IMAGE
        if default and others and not measured:
            found[name] = _NOT_IN_IMAGE, others[0]
    return found


def shipped_kernels(kernels: Mapping[str, str]) -> dict[str, str]:
    """Return the kernels that the shipped image has, from kernels by the GPU's name."""
    return {gpu: kernel for gpu, kernel in kernels.items() if kernel != _NOT_IN_IMAGE}


def _kinds(cluster: Cluster) -> dict[str, Device]:
    return {rank.device.name: rank.device for rank in cluster.ranks}
