"""The number of parts in which the keys of the first exchange step travel.

More parts hide more of the first keys, but each part is a kernel call of its own over fewer heads, and a
call that leaves most of a GPU idle costs more than it hides.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.plan.model import Replica

#: More parts hide hardly more: of four, three hide behind the part before.
MOST_PARTS = 4
#: Queries times heads of a call that keeps a GPU busy: two rounds of 128-row tiles on the 132 multiprocessors
#: of an H100 (FlashAttention-3, arXiv 2407.08608, gives each a tile of 128 queries of one head).
BUSY_ROWS = 2 * 132 * 128


def worthwhile_parts(replicas: Sequence[Replica]) -> int:
    """Return the most parts that still keep a GPU busy, by the busiest unit of every group.

    The others of its group have less work and wait for it anyway.
    """
    rows = [
        group.tokens * max(member.heads[1] - member.heads[0] for member in group.members)
        for replica in replicas
        for group in replica.domain.groups
        if group.tokens and (len(replica.domain.groups) > 1 or len(group.members) > 1)
    ]
    return max(1, min([MOST_PARTS, *(rows_of_group // BUSY_ROWS for rows_of_group in rows)])) if rows else 1
