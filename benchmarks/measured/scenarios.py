"""The clusters and the jobs that are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured.layouts import Layout
from benchmarks.measured.ministages import interleaved_layouts, ministage_layouts
from benchmarks.measured.nodes import node_layouts
from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job
from megatron_hexi.models.megatron_arguments import model_from_arguments
from megatron_hexi.planner import CHOSEN, Request
from megatron_hexi.shell.words import unplaced

#: Where the emulated clusters are described.
CLUSTERS = Path("scripts/testbed")

#: Narrow, so that gradients are small beside a long sequence's attention, with many heads to deal out.
MODEL = {
    "--num-layers": 2,
    "--hidden-size": 256,
    "--num-attention-heads": 8,
    "--kv-channels": 64,
    "--group-query-attention": None,
    "--num-query-groups": 4,
    "--ffn-hidden-size": 768,
    "--vocab-size": 512,
    "--max-position-embeddings": 2**17,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
}


@dataclass(frozen=True)
class Scenario:
    """One cluster, one job.

    Args:
        name: of its results.
        cluster: the cluster file's name.
        seq_length: tokens of a sequence.
        decides: what is scarce, for people.
        speeds: how the testbed makes ranks slow: ``paced`` or ``quota``.
        sizes: layers, hidden size and that of the MLP.
        experts: experts of each layer, as wide as the MLP; 0: layers have an MLP.
        active: experts of a token.
        batch: sequences of an iteration.
        is_free: whether the planner chooses everything, and is set beside the best of Megatron's flags only.
        micro_batch: sequences of a micro-batch.
        layouts: what is run; ``None``: what the planner and its baselines find.
    """

    name: str
    cluster: str
    seq_length: int
    decides: str
    speeds: str = "paced"
    sizes: tuple[int, int, int] = (2, 256, 768)
    experts: int = 0
    active: int = 2
    batch: int = 1
    is_free: bool = False
    micro_batch: int = 1
    layouts: Callable[[Scenario, Cluster], list[Layout]] | None = None

    @property
    def file(self) -> Path:
        """Its cluster file."""
        return CLUSTERS / f"{self.cluster}.yaml"

    @property
    def job(self) -> Job:
        """What is trained, as the planner takes it."""
        return Job(
            model=model_from_arguments(unplaced(words(self.model)), Path("scenarios")),
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch,
            global_batch_size=self.batch,
            precision="fp32",
            distributed_optimizer=self.is_free,
            overlap_gradients=True,
        )

    @property
    def request(self) -> Request:
        """Of the planner: one replica of one stage, where layouts are what is compared."""
        return Request(self.job, frozenset({"micro_batch_size"} if self.is_free else CHOSEN))

    @property
    def model(self) -> dict[str, object]:
        """The model, as Megatron takes it."""
        sizes = zip(("--num-layers", "--hidden-size", "--ffn-hidden-size"), self.sizes, strict=True)
        experts = {
            "--num-experts": self.experts,
            "--moe-ffn-hidden-size": self.sizes[2],
            "--moe-router-topk": self.active,
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-router-load-balancing-type": "none",
        }
        return {**MODEL, **dict(sizes), **(experts if self.experts else {})}

    def arguments(self, iterations: int) -> dict[str, object]:
        """What is trained, as Megatron takes it."""
        return {
            **self.model,
            "--seq-length": self.seq_length,
            "--micro-batch-size": self.micro_batch,
            "--global-batch-size": self.batch,
            "--train-iters": iterations,
            "--lr": 1e-4,
            "--lr-decay-style": "constant",
            "--eval-iters": 0,
            "--eval-interval": 1_000_000,
            "--log-interval": 1,
            # A layer's gradients travel while the one before it is computed.
            "--overlap-grad-reduce": None,
            "--ddp-bucket-size": 300_000,
            "--attention-dropout": 0,
            "--hidden-dropout": 0,
            **({"--use-distributed-optimizer": None} if self.is_free else {}),
            "--mock-data": None,
            "--tokenizer-type": "NullTokenizer",
            "--make-vocab-size-divisible-by": 1,
            "--num-workers": 0,
            "--hexi-platform": "cpu",
        }


SCENARIOS = (
    Scenario("two-fast-two-slow", "two-fast-two-slow", 6144, "speed, 2 : 1, and the link between the pairs"),
    Scenario("longer", "two-fast-two-slow", 8192, "as in two-fast-two-slow; links matter less"),
    Scenario("memory-decides", "memory-decides", 12288, "memory: all run alike, and two have little of it"),
    Scenario("three-speeds", "three-speeds", 8192, "three speeds on three nodes"),
    Scenario(
        "thin-links",
        "thin-links",
        256,
        "the link between two nodes of 2 : 1; everything is the planner's to choose",
        sizes=(12, 256, 768),
        batch=8,
        is_free=True,
    ),
    Scenario(
        "little-memory",
        "little-memory",
        512,
        "memory of the slower of two nodes; everything is the planner's to choose",
        sizes=(12, 384, 1536),
        batch=4,
        is_free=True,
    ),
    Scenario(
        "ministages",
        "four-equal",
        128,
        "nothing; stages run whole beside the same in ministages of one layer, offloaded, and dealt",
        sizes=(8, 384, 1536),
        batch=16,
        micro_batch=4,
        layouts=ministage_layouts,
    ),
    Scenario(
        "interleaved",
        "four-equal",
        128,
        "nothing; stages run whole beside the same with ministages of one layer interleaved",
        sizes=(8, 384, 1536),
        batch=16,
        micro_batch=4,
        layouts=interleaved_layouts,
    ),
    Scenario(
        "experts",
        "experts",
        1024,
        "as in two-fast-two-slow, with experts of each layer to deal out",
        sizes=(2, 384, 1536),
        experts=32,
    ),
    Scenario(
        "once to a node",
        "experts-thin-links",
        512,
        "the link between two nodes, which rows of experts cross",
        sizes=(2, 256, 128),
        experts=32,
        active=8,
        batch=4,
        micro_batch=4,
        layouts=node_layouts,
    ),
    Scenario("by quotas", "two-fast-two-slow-quota", 6144, "as in two-fast-two-slow", "quota"),
)


def words(options: Mapping[str, object]) -> list[str]:
    """Options as a command line has them."""
    return [str(word) for option in options.items() for word in option if word is not None]
