"""What each assumption is worth: the errors of a table if it were otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published.predict import compare
from benchmarks.published.tables import Table, tables


@dataclass(frozen=True)
class Variant:
    """An assumption that is changed.

    Args:
        text: to what.
        table: in which table.
        fields: of its rows.
    """

    text: str
    table: str
    fields: Mapping[str, Any] = field(default_factory=dict)


_BEST = {"layer_share": 1.0}
VARIANTS = (
    *(
        Variant("a layer's matrices as fast as the best shapes", table, _BEST)
        for table in ("nemo-h100", "nemo-b200", "bridge", "internevo")
    ),
    Variant("cuDNN in place of FlashAttention-2", "nemo-h100", {"kernel": "cudnn"}),
    Variant("FlashAttention-3 in place of FlashAttention-2", "nemo-h100", {"kernel": "flash-attn-3"}),
    Variant("sums in units charged", "bridge", {"hidden_sums": False}),
    Variant("sums in units charged", "torchtitan-405b", {"hidden_sums": False}),
    Variant("keys, values and their gradients hidden", "torchtitan-8b", {"torch_ring": False}),
    Variant("keys, values and their gradients hidden", "torchtitan-405b", {"torch_ring": False}),
    Variant("gradients hidden behind the backward pass", "bigscience", {"overlap_gradients": True}),
    Variant("gradients hidden behind the backward pass", "dlperf", {"overlap_gradients": True}),
    Variant("sends left under way", "sailor-mixed", {"blocking": False}),
    Variant("sends left under way", "sailor-gh200", {"blocking": False}),
)


def changed(variant: Variant) -> Table:
    """The table with all its rows so."""
    (table,) = (table for table in tables() if table.name == variant.table)
    return replace(table, rows=tuple(replace(row, **variant.fields) for row in table.rows))


def time_errors(table: Table) -> Iterator[float]:
    """The error of each row's time, in order."""
    return (one.error for one in compare(table) if one.what == "time")
