"""Drawings of one plan at rest: who holds which positions, and how tokens become heads inside a group."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.plan import Domain
from megatron_hexi.plan.layout import consecutive, shard_segments
from scripts.docs.drawing import (
    GROUP_COLOURS,
    WORKLOAD,
    add_rectangle,
    add_triangle,
    set_up_mask,
    small_domain,
    visible,
)

#: Opacity of a group's members, so that neighbours can be told apart.
_SHADES = (1.0, 0.6)


def draw_layout() -> Figure:
    """The nested zigzag: positions of every rank on the left, the attention of every group on the right."""
    domain = small_domain()
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    bars, mask = figure.subplots(1, 2, width_ratios=[1.6, 1])
    _draw_positions(bars, domain)
    _draw_areas(mask, domain)
    return figure


def draw_all_to_all() -> Figure:
    """The two cuts of the first group: by tokens outside attention, by heads inside."""
    group = small_domain().groups[0]
    figure = Figure(figsize=(7.5, 2.9), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True)
    heads = (0, WORKLOAD.local_heads)
    shards = consecutive(member.tokens for member in group.members)
    for number, (member, shard) in enumerate(zip(group.members, shards, strict=True)):
        for axes, across, down in ((before, shard, heads), (after, (0, group.tokens), member.heads)):
            add_rectangle(axes, across, down, GROUP_COLOURS[0], alpha=_SHADES[number], edgecolor="white")
            middle = (across[0] + across[1]) / 2, (down[0] + down[1]) / 2
            axes.text(*middle, f"rank {member.number}", ha="center", va="center")
    for axes, title in ((before, "outside attention"), (after, "in attention")):
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, group.tokens)
        axes.set_ylim(heads[1], 0)
        axes.set_xlabel("tokens of the group")
        axes.spines[["top", "right"]].set_visible(False)
    before.set_ylabel("query heads")
    return figure


def _draw_positions(axes: Axes, domain: Domain) -> None:
    names: list[str] = []
    for g, group in enumerate(domain.groups):
        for m, member in enumerate(group.members):
            row = len(names)
            for segment in shard_segments(group, m):
                down = (row, row + 1)
                add_rectangle(axes, segment, down, GROUP_COLOURS[g], alpha=_SHADES[m % 2], edgecolor="white")
            names.append(f"group {g}, rank {member.number}: {member.tokens}")
    axes.set_xlim(0, WORKLOAD.seq_length)
    axes.set_ylim(len(names), 0)
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("position in the sequence")
    axes.set_title("who holds which tokens", fontsize=10)


def _draw_areas(axes: Axes, domain: Domain) -> None:
    held = [segment for group in domain.groups for segment in group.segments]
    for g, group in enumerate(domain.groups):
        for segment in group.segments:
            add_triangle(axes, segment, GROUP_COLOURS[g])
            for keys in visible(segment, held):
                add_rectangle(axes, keys, segment, GROUP_COLOURS[g], edgecolor="white")
    set_up_mask(axes, WORKLOAD.seq_length, "whose queries see which keys")
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
