"""Hosts and ranks as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.doctor.facts import Facts


def who_has_what(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """Values with the ranks that have them: ``2.27.3 on a (rank 0-7); 2.26.2 on b (rank 8)``."""
    groups: dict[str, list[Facts]] = {}
    for own, value in zip(facts, values, strict=True):
        groups.setdefault(value, []).append(own)
    return "; ".join(f"{value} on {spell_places(those)}" for value, those in groups.items())


def spell_places(facts: Sequence[Facts]) -> str:
    """Hosts with their ranks: ``a (rank 0-7), b (rank 8)``."""
    hosts: dict[str, list[int]] = {}
    for own in facts:
        ranks = hosts.setdefault(own.host, [])
        if own.rank is not None:
            ranks.append(own.rank)
    return ", ".join(f"{host} (rank {ranges(ranks)})" if ranks else host for host, ranks in hosts.items())


def ranges(ranks: Sequence[int]) -> str:
    """``0-3, 5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
