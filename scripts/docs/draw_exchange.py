"""The drawing of the exchange: which part of attention is computed in which step, and whose keys travel."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_hexi.plan import Domain, build_schedule
from megatron_hexi.plan.layout import slice_segments
from scripts.docs.drawing import (
    FAINT,
    GROUP_COLOURS,
    WORKLOAD,
    add_rectangle,
    add_triangle,
    set_up_mask,
    small_domain,
    visible,
)


def draw_exchange() -> Figure:
    """One panel a step, the own block first; what was computed before is grey."""
    domain = small_domain()
    groups = len(domain.groups)
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    for axes, step in zip(figure.subplots(1, groups), range(groups), strict=True):
        for earlier in range(step + 1):
            _draw_step(axes, domain, earlier, grey=earlier < step)
        set_up_mask(axes, WORKLOAD.seq_length, _title(domain, step))
        axes.set_xlabel("keys")
    figure.axes[0].set_ylabel("queries")
    return figure


def _draw_step(axes: Axes, domain: Domain, step: int, *, grey: bool) -> None:
    for g, group in enumerate(domain.groups):
        colour = FAINT if grey else GROUP_COLOURS[g]
        if step == 0:
            for segment in group.segments:
                add_triangle(axes, segment, colour)
                for keys in visible(segment, group.segments):
                    add_rectangle(axes, keys, segment, colour, edgecolor="white")
            continue
        source = domain.groups[_source(domain, g, step)]
        index = [member.number for member in domain.members].index(group.members[0].number)
        schedule = build_schedule(WORKLOAD, domain, index, parts=1)
        for block in schedule.steps[step - 1].blocks:
            for down in slice_segments(group.segments, *block.queries):
                for across in slice_segments(source.segments, *block.keys):
                    add_rectangle(axes, across, down, colour, edgecolor="white")


def _source(domain: Domain, group: int, step: int) -> int:
    """Whose keys a group uses in a step: the owners of what its schedule says that it receives."""
    ranks = [member.number for member in domain.members]
    index = ranks.index(domain.groups[group].members[0].number)
    schedule = build_schedule(WORKLOAD, domain, index, parts=1)
    owner = ranks[schedule.steps[step - 1].receives[0].peer]
    return next(
        number
        for number, one in enumerate(domain.groups)
        if owner in {member.number for member in one.members}
    )


def _title(domain: Domain, step: int) -> str:
    if step == 0:
        return "step 0: the own group's block"
    travels = (f"{_source(domain, group, step)} → {group}" for group in range(len(domain.groups)))
    return f"step {step}: keys of {', '.join(travels)}"
