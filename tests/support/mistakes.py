"""A good plan, and edits of it by which a person breaks it."""

from dataclasses import dataclass

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import read_plan

GOOD = """\
version: 2
workload:
  seq_length: 64
  heads: 8
  kv_heads: 4
  head_dim: 16
  causal: true
  layers: 2
  value_dim: 16
replicas:
- micro_batches: 3
  stages:
  - layers: null
    domains:
    - groups:
      - name: fast
        segments: [[0, 20], [44, 64]]
        members:
        - {ranks: [0], tokens: 25, heads: [0, 5]}
        - {ranks: [1], tokens: 15, heads: [5, 8]}
      - name: slow
        segments: [[20, 44]]
        members:
        - {ranks: [2], tokens: 24, heads: [0, 8]}
exchange: {window: 1}
estimate: {iteration_s: 1.5, memory_gib: [1.0, 2.0, 3.0], against: {ring: 2.5}}
provenance: {planner: hexi, seed: 0}
"""

GROUPS = "replicas[0].stages[0].domains[0].groups"
FAST, SLOW = f"{GROUPS}[0]", f"{GROUPS}[1]"
SLOW_GROUP = """\
      - name: slow
        segments: [[20, 44]]
        members:
        - {ranks: [2], tokens: 24, heads: [0, 8]}
"""
GROUPS_TEXT = GOOD[GOOD.index("      - name: fast") : GOOD.index("exchange:")]
STAGE = GOOD[GOOD.index("  - layers: null") : GOOD.index("exchange:")]


@dataclass
class Mistake:
    """An edit of the good plan, the line that the error names, and what else it says, in this order."""

    name: str
    old: str
    new: str | bytes
    line: int
    says: tuple[str, ...]


def whole(name, content, line, *says):
    return Mistake(name, GOOD, content, line, says)


def edit(name, old, new, line, *says):
    return Mistake(name, old, new, line, says)


def error_of(mistake, folder):
    path = folder / "plan.yaml"
    content = mistake.new
    if isinstance(content, str):
        assert GOOD.count(mistake.old) == 1, "the edit must be the only one that it can be"
        content = GOOD.replace(mistake.old, content).encode()
    path.write_bytes(content)
    with pytest.raises(HexiError) as caught:
        read_plan(path)
    return str(caught.value), path
