"""Plans whose ranks hold unequal numbers of experts, for a small model of six layers with eight experts."""

from __future__ import annotations

from pathlib import Path

from megatron_hexi.plan import Plan, read_plan

EXPERTS, LAYERS, MICRO_BATCH, MICRO_BATCHES = 8, 6, 4, 4

HEADER = f"""\
version: 2
workload: {{seq_length: 127, heads: 6, kv_heads: 2, head_dim: 16, layers: {LAYERS}, experts: {EXPERTS}}}
job: {{micro_batch_size: {MICRO_BATCH}}}
replicas:
"""

#: Four layers on three ranks that hold 5, 2 and 1 experts, and 70, 15 and 42 tokens in two groups.
_UNEVEN = """\
  - {layers: [0, 2], domains: [{ranks: [0]}]}
  - layers: [2, 6]
    domains:
    - groups:
      - segments: [[0, 40], [82, 127]]
        members:
        - {ranks: [1], tokens: 70, heads: [0, 4], experts: [0, 5]}
        - {ranks: [2], tokens: 15, heads: [4, 6], experts: [5, 7]}
      - segments: [[40, 82]]
        members: [{ranks: [3], tokens: 42, heads: [0, 6], experts: [7, 8]}]
"""

LAYOUTS: dict[str, str] = {
    "uneven": f"- stages:\n{_UNEVEN}",
    # Three micro-batches on these, beside one on two ranks in one stage that share tokens and experts.
    "replicas": f"""\
- micro_batches: 3
  stages:
{_UNEVEN}- micro_batches: 1
  stages:
  - layers: [0, 6]
    domains:
    - groups:
      - segments: [[0, 20], [100, 127]]
        members: [{{ranks: [4], tokens: 47, heads: [0, 6], experts: [0, 3]}}]
      - segments: [[20, 100]]
        members: [{{ranks: [5], tokens: 80, heads: [0, 6], experts: [3, 8]}}]
""",
    # Samples of a unit of two ranks and a single rank, which share the experts; then a rank without any.
    "samples": """\
- micro_batches: 3
  stages:
  - layers: [0, 3]
    domains:
    - {ranks: [0, 1], samples: 3, state: 3, experts: [[0, 3], [3, 6]]}
    - {ranks: [2], samples: 1, experts: [6, 8]}
  - layers: [3, 6]
    domains:
    - {ranks: [3], samples: 2, experts: [0, 8]}
    - {ranks: [4], samples: 2, experts: [8, 8]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [5]}]}
""",
    # A unit that cuts its experts beside whole ones, out of order; then every expert twice, cut otherwise.
    "slices": """\
- stages:
  - layers: [0, 4]
    domains:
    - {ranks: [0, 1], samples: 3, experts: [3, 8]}
    - {ranks: [2], samples: 1, experts: [0, 3]}
  - layers: [4, 6]
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [3], tokens: 60, heads: [0, 3], experts: [0, 5]}
        - {ranks: [4], tokens: 20, heads: [3, 4], experts: [5, 8]}
        - {ranks: [5], tokens: 47, heads: [4, 6], experts: [0, 8]}
""",
    # Units that say nothing hold all experts, cut between their ranks.
    "unstated": """\
- micro_batches: 3
  stages:
  - {layers: [0, 3], domains: [{ranks: [0, 1]}]}
  - {layers: [3, 6], domains: [{ranks: [2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [3], state: 2}]}
""",
    # Ministages, and all layers of the first stage are computed again.
    "ministages": """\
- stages:
  - layers: [0, 3]
    ministages: 2
    recompute: full
    domains:
    - {ranks: [0], samples: 3, experts: [0, 6]}
    - {ranks: [1], samples: 1, experts: [6, 8]}
  - layers: [3, 6]
    ministages: 2
    domains:
    - {ranks: [2], samples: 1, experts: [0, 1]}
    - {ranks: [3], samples: 3, experts: [1, 8]}
""",
    # The same with all that can be in host memory there.
    "offload": """\
- stages:
  - layers: [0, 4]
    ministages: 2
    offload: [parameters, optimizer, activations]
    domains:
    - {ranks: [0], samples: 3, experts: [0, 6]}
    - {ranks: [1], samples: 1, experts: [6, 8]}
  - layers: [4, 6]
    ministages: 2
    offload: [parameters, optimizer, activations]
    domains: [{ranks: [2]}]
""",
    # Whole micro-batches of domains that are expert domains of their own.
    "dealt": """\
- micro_batches: 4
  stages:
  - layers: [0, 4]
    ministages: 2
    domains:
    - micro_batches: 3
      groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 4], experts: [0, 7]}
        - {ranks: [1], tokens: 37, heads: [4, 6], experts: [7, 8]}
    - {ranks: [2], micro_batches: 1}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [3]}]}
""",
    # A stage in full, one with its first layers computed again; experts that follow shares of samples.
    "recomputed": """\
- stages:
  - {layers: [0, 2], domains: [{ranks: [0]}], recompute: 1}
  - layers: [2, 6]
    recompute: full
    domains:
    - {ranks: [1], samples: 2, experts: [0, 5]}
    - {ranks: [2], samples: 1, experts: [5, 7]}
    - {ranks: [3], samples: 1, experts: [7, 8]}
""",
    # Rows travel once to a node: nodes of one, two and three ranks, some without experts or with slices.
    "nodes": """\
- micro_batches: 3
  stages:
  - layers: [0, 3]
    expert_nodes: [[0, 2], [1]]
    domains:
    - {ranks: [0], samples: 1, experts: [0, 3]}
    - {ranks: [1], samples: 2, experts: [3, 4]}
    - {ranks: [2], samples: 1, experts: [4, 8]}
  - layers: [3, 6]
    expert_nodes: [[3, 4], [5, 6, 7]]
    domains:
    - {ranks: [3], samples: 1, experts: [6, 8]}
    - {ranks: [4], samples: 1, experts: [8, 8]}
    - {ranks: [5, 6], samples: 1, experts: [0, 4]}
    - {ranks: [7], samples: 1, experts: [4, 6]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [8]}]}
""",
    # One replica on ranks that hold no tokens, or no heads, or no experts.
    "nothing": """\
- stages:
  - layers: [0, 6]
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 127, heads: [0, 4], experts: [8, 8]}
        - {ranks: [1], tokens: 0, heads: [4, 6], experts: [0, 3]}
        - {ranks: [2], tokens: 0, heads: [6, 6], experts: [3, 8]}
""",
}


def expert_layout(name: str, folder: Path) -> Plan:
    """One of the layouts as a plan, read from a file in a folder."""
    path = folder / f"{name}.yaml"
    path.write_text(HEADER + LAYOUTS[name])
    return read_plan(path)
