"""Choose `exchange.parts`, the number of messages that carry the keys of the first exchange step.

With more parts, more of the transfer of the first keys is hidden. But each part needs a kernel call over
fewer heads, and a call that leaves most of a GPU idle costs more time than it hides.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.plan.model import Replica

#: Largest number of parts. With four, three are hidden behind the part before; more parts hide hardly more.
MOST_PARTS = 4
#: Smallest queries x heads of a kernel call that keeps a GPU busy: two rounds of tiles on the 132
#: multiprocessors of an H100. A tile is 128 queries of one head (FlashAttention-3, arXiv 2407.08608).
BUSY_ROWS = 2 * 132 * 128


def worthwhile_parts(replicas: Sequence[Replica]) -> int:
    """Return the largest number of parts with which every kernel call of a group's busiest unit fills a GPU.

    The other units of the group have less work and wait for the busiest unit anyway.
    """
    rows = [
        group.tokens * max(member.heads[1] - member.heads[0] for member in group.members)
        for replica in replicas
        for group in replica.domain.groups
        if group.tokens and (len(replica.domain.groups) > 1 or len(group.members) > 1)
    ]
    return max(1, min([MOST_PARTS, *(rows_of_group // BUSY_ROWS for rows_of_group in rows)])) if rows else 1
