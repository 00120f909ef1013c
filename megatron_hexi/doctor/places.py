"""Text for hosts, ranks and the values that they have."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.doctor.facts import Facts


def values_by_rank(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """Return values with the ranks that have them: ``2.27.3 on a (rank 0-7); 2.26.2 on b (rank 8)``."""
    groups: dict[str, list[Facts]] = {}
    for rank_facts, value in zip(facts, values, strict=True):
        groups.setdefault(value, []).append(rank_facts)
    return "; ".join(f"{value} on {spell_places(ranks)}" for value, ranks in groups.items())


def spell_places(facts: Sequence[Facts]) -> str:
    """Return hosts with their ranks as text: ``a (rank 0-7), b (rank 8)``."""
    hosts: dict[str, list[int]] = {}
    for rank_facts in facts:
        ranks = hosts.setdefault(rank_facts.host, [])
        if rank_facts.rank is not None:
            ranks.append(rank_facts.rank)
    return ", ".join(f"{host} (rank {ranges(ranks)})" if ranks else host for host, ranks in hosts.items())


def ranges(ranks: Sequence[int]) -> str:
    """Return numbers as text, such as ``0-3, 5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
