"""A small model that can be computed in fp8 on units of two ranks, and uneven plans for it.

Its sizes are multiples of 32 on each rank, as MXFP8 asks for; its sequences are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.plan import Plan, Workload, proportional_plan, read_plan
from megatron_hexi.plan.terms import Fp8Recipe
from tests.megatron.option_cases import LATENT

RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "delayed", "blockwise", "mxfp8")
LAYERS, EXPERTS = 4, 4
SIZES = (
    *("--num-layers", str(LAYERS), "--hidden-size", "128", "--num-attention-heads", "8"),
    *("--num-query-groups", "4", "--ffn-hidden-size", "256", "--disable-bias-linear"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--calculate-per-token-loss"),
)
ROUTED = (
    *("--num-experts", str(EXPERTS), "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-layer-freq", "[0]+[1]*3"),
    *("--moe-router-load-balancing-type", "none"),
)
LATENT_MODEL = (
    *(*LATENT, "--kv-lora-rank", "32", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "32"),
    *("--v-head-dim", "48"),
)

HEADER = """\
version: 2
workload: {{seq_length: 127, heads: 8, kv_heads: {kv_heads}, head_dim: {head_dim}, layers: 4{more}}}
job: {{micro_batch_size: 1}}
replicas:
"""


def fp8(recipe: str, form: str = "hybrid") -> tuple[str, ...]:
    """Arguments of a job in fp8."""
    return ("--bf16", "--fp8-format", form, "--fp8-recipe", recipe)


@dataclass(frozen=True)
class Case:
    """A job with an uneven plan.

    Attributes:
        replicas: those of the plan, as they are written in the file.
        model: further arguments, of the run on one rank too.
        head_dim: columns of a head's key.
        exchange: what the plan's workload says of the exchange of latent columns.
        kv_heads: KV heads.
    """

    replicas: str
    model: tuple[str, ...] = ()
    head_dim: int = 16
    kv_heads: int = 4
    exchange: str = ""

    @property
    def alone(self) -> Plan:
        """A plan of one rank."""
        sizes = Workload(127, heads=8, kv_heads=self.kv_heads, head_dim=self.head_dim, layers=LAYERS)
        return proportional_plan(sizes, [[[1]]])

    def plan(self, folder: Path) -> Plan:
        path = folder / "given.yaml"
        experts = f", experts: {EXPERTS}" if "--num-experts" in self.model else ""
        more = experts + self.exchange
        header = HEADER.format(kv_heads=self.kv_heads, head_dim=self.head_dim, more=more)
        path.write_text(header + self.replicas)
        return read_plan(path)


#: Two groups, of three members and of one; the third of the first has no fp8.
MIXED_GROUPS = """\
- micro_batches: 4
  stages:
  - layers: [0, 4]
    domains:
    - groups:
      - segments: [[0, 50], [77, 127]]
        members:
        - {ranks: [0], tokens: 51, heads: [0, 4]}
        - {ranks: [1], tokens: 36, heads: [4, 7]}
        - {ranks: [2], tokens: 13, heads: [7, 8], precision: bf16}
      - segments: [[50, 77]]
        members: [{ranks: [3], tokens: 27, heads: [0, 8]}]
"""
LATENT_STAGES = """\
- micro_batches: 4
  stages:
  - {layers: [0, 3], domains: [{ranks: [0, 1]}]}
  - layers: [3, 4]
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [2], tokens: 90, heads: [0, 5]}
        - {ranks: [3], tokens: 37, heads: [5, 8]}
"""
CASES = {
    "groups": Case(MIXED_GROUPS.replace(", precision: bf16", "")),
    "units": Case(
        """\
- micro_batches: 3
  stages:
  - {layers: [0, 1], domains: [{ranks: [0, 1]}]}
  - {layers: [1, 4], domains: [{ranks: [2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
"""
    ),
    "experts": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - layers: [1, 4]
    domains:
    - groups:
      - segments: [[0, 40], [82, 127]]
        members:
        - {ranks: [1], tokens: 70, heads: [0, 6], experts: [0, 2]}
        - {ranks: [2], tokens: 15, heads: [6, 8], experts: [2, 3]}
      - segments: [[40, 82]]
        members: [{ranks: [3], tokens: 42, heads: [0, 8], experts: [3, 4]}]
""",
        ROUTED,
    ),
    "latent": Case(LATENT_STAGES, LATENT_MODEL, head_dim=48, kv_heads=8),
    "latent-columns": Case(
        LATENT_STAGES,
        LATENT_MODEL,
        head_dim=48,
        kv_heads=8,
        exchange=", latent_exchange: {kv_rank: 32, rotary_dim: 32}",
    ),
    "ministages": Case(
        """\
- micro_batches: 4
  stages:
  - layers: [0, 2]
    ministages: 2
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 6]}
        - {ranks: [1], tokens: 37, heads: [6, 8]}
  - {layers: [2, 4], ministages: 2, recompute: full, domains: [{ranks: [2]}]}
"""
    ),
    "mixed-groups": Case(MIXED_GROUPS),
    "mixed-stages": Case(
        """\
- micro_batches: 3
  stages:
  - {layers: [0, 1], domains: [{ranks: [0], precision: bf16}]}
  - {layers: [1, 4], domains: [{ranks: [1, 2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
"""
    ),
}
