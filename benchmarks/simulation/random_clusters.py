"""Twenty clusters that nobody chose: drawn from a fixed seed, published as files beside those of the suite.

python -m benchmarks.simulation.random_clusters     # writes them again; the same bytes
"""

from __future__ import annotations

from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent / "clusters"
COUNT = 20
_SEED = 2605_07569

#: What has bf16 and room for the weights and gradients of a 3B model on one GPU.
GPUS = (
    "H100-SXM-80GB",
    "H200-SXM-141GB",
    "B200-180GB",
    "GH200-96GB",
    "H100-NVL-94GB",
    "H100-PCIe-80GB",
    "A100-SXM-40GB",
    "A100-SXM-80GB",
    "A100-PCIe-80GB",
    "A800-SXM-80GB",
    "L40S-48GB",
    "L40-48GB",
    "L4-24GB",
    "A6000-48GB",
    "A10G-24GB",
    "RTX4090-24GB",
    "RTX3090-24GB",
)
#: GB/s a direction: 40, 100, 200 and 400 Gb/s cards.
_NETWORKS = (5, 12.5, 25, 50)


def names() -> tuple[str, ...]:
    """The clusters' names."""
    return tuple(f"random-{number:02d}" for number in range(1, COUNT + 1))


def cluster_text(number: int) -> str:
    """The file of one of them: 2 to 8 nodes of at least two models, 1 to 8 GPUs each, any network.

    Args:
        number: from 1.
    """
    random = Random(_SEED + number)
    count = random.randint(2, 8)
    models = random.sample(GPUS, random.randint(2, min(4, count)))
    chosen = models + [random.choice(models) for _ in range(count - len(models))]
    nodes = [(gpu, random.randint(1, 8)) for gpu in chosen]
    bandwidth, per = random.choice(_NETWORKS), random.choice(("gpu", "node"))
    lines = [
        f"# Drawn from seed {_SEED} + {number} by benchmarks/simulation/random_clusters.py.",
        "# Links inside nodes are the catalogue's.",
        f"name: random-{number:02d}",
        "nodes:",
        *(f"- {{name: node{place}, gpu: {gpu}, gpus: {gpus}}}" for place, (gpu, gpus) in enumerate(nodes)),
        f"network: {{bandwidth_gb_s: {bandwidth}, latency_us: 10, per: {per}}}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write them all."""
    for number, name in enumerate(names(), start=1):
        (FOLDER / f"{name}.yaml").write_text(cluster_text(number), encoding="utf-8")


if __name__ == "__main__":
    main()
