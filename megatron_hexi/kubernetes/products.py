"""Labels of nodes by GPU, as NVIDIA's gpu-feature-discovery sets them."""

from __future__ import annotations

#: https://github.com/NVIDIA/k8s-device-plugin/tree/main/docs/gpu-feature-discovery: the driver's name of the
#: GPU, with dashes for blanks.
PRODUCT_LABEL = "nvidia.com/gpu.product"

# Names as the driver has them (https://github.com/NVIDIA/open-gpu-kernel-modules, README.md). Drivers before
# 470 leave the vendor out.
_DRIVER_NAMES = {
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "H100-SXM-80GB": "H100-80GB-HBM3",
    "H200-SXM-141GB": "H200",
    "B200-180GB": "B200",
    "GH200-96GB": "GH200-480GB",
    "H100-NVL-94GB": "H100-NVL",
    "H100-PCIe-80GB": "H100-PCIe",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100-PCIe-80GB": "A100-80GB-PCIe",
    "A800-SXM-80GB": "A800-SXM4-80GB",
    "L40S-48GB": "L40S",
    "L40-48GB": "L40",
    "L4-24GB": "L4",
    "A6000-48GB": "RTX-A6000",
    "A10G-24GB": "A10G",
    "RTX4090-24GB": "GeForce-RTX-4090",
    "RTX3090-24GB": "GeForce-RTX-3090",
    "RTX3080Ti-12GB": "GeForce-RTX-3080-Ti",
    "RTX2080Ti-11GB": "GeForce-RTX-2080-Ti",
}
_TESLA_NAMES = {
    "V100-SXM2-16GB": "Tesla-V100-SXM2-16GB",
    "V100-SXM2-32GB": "Tesla-V100-SXM2-32GB",
    "V100-PCIe-16GB": "Tesla-V100-PCIE-16GB",
    "T4-16GB": "Tesla-T4",
    "TitanRTX-24GB": "TITAN-RTX",
}


def product_labels(gpu: str) -> tuple[str, ...]:
    """Return the values of `PRODUCT_LABEL` that a GPU of the catalogue may have; empty: none is known.

    >>> product_labels("H100-SXM-80GB")
    ('NVIDIA-H100-80GB-HBM3', 'H100-80GB-HBM3')
    """
    if gpu in _TESLA_NAMES:
        name = _TESLA_NAMES[gpu]
        return (name, f"NVIDIA-{name}")
    if gpu in _DRIVER_NAMES:
        name = _DRIVER_NAMES[gpu]
        return (f"NVIDIA-{name}", name)
    return ()
