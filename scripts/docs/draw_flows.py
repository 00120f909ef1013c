"""Drawings of what happens in order: from a cluster file to training ranks, and after a node failure."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.docs.drawing import FAINT, WORKLOAD, add_box, small_domain

_FILE, _PROGRAM = "#ffffff", "#a6cee3"
#: Of what each group of ranks gets; the colours of the other drawings, lighter.
_SHARES = ("#b2dfd0", "#fbcfab", "#cfcde6")
_BACK = "a node comes back: it is taken in after the next checkpoint or copy"


def draw_job() -> Figure:
    """The way of a job: files are white, programs blue."""
    figure, axes = _empty(10, 2.7)
    add_box(axes, (0.0, 1.5), (1.9, 0.8), "cluster.yaml\nnodes, GPUs, links", _FILE)
    add_box(axes, (0.0, 0.2), (1.9, 0.8), "--model\nconfig.json, arguments", _FILE)
    add_box(axes, (2.7, 0.85), (1.3, 0.8), "hexi plan", _PROGRAM)
    add_box(axes, (4.8, 0.85), (2.1, 0.8), "plan.yaml\ntokens, heads, layers", _FILE)
    add_box(axes, (7.7, 0.85), (2.2, 0.8), "pretrain_gpt.py\n--hexi-plan plan.yaml", _PROGRAM)
    for number, (group, colour) in enumerate(zip(small_domain().groups, _SHARES, strict=True)):
        ranks, height = ", ".join(str(member.number) for member in group.members), 2.05 - number * 0.8
        named = f"rank{'s' * (len(group.members) > 1)} {ranks}"
        text = f"{named}: {group.tokens} of {WORKLOAD.seq_length} tokens"
        add_box(axes, (10.7, height - 0.3), (2.5, 0.6), text, colour)
        _arrow(axes, (9.9, 1.25), (10.7, height))
    for start, stop in (
        ((1.9, 1.9), (2.7, 1.35)),
        ((1.9, 0.6), (2.7, 1.15)),
        ((4.0, 1.25), (4.8, 1.25)),
        ((6.9, 1.25), (7.7, 1.25)),
    ):
        _arrow(axes, start, stop)
    axes.text(8.8, 0.5, "Megatron-LM, unmodified", ha="center", fontsize=8)
    return _trim(figure, axes, (-0.1, 13.3), (0.0, 2.5))


def draw_node_failure() -> Figure:
    """Draw the steps of an elastic job from the failure of a node to its next iteration."""
    figure, axes = _empty(10, 2.2)
    steps = (
        ("training\non nodes 0, 1, 2", _PROGRAM),
        ("node 1 fails", "#fb9a99"),
        ("survivors name it\nand end", FAINT),
        ("a plan for\nnodes 0 and 2", _FILE),
        ("ranks start,\nload the newest\ncheckpoint or copy", FAINT),
        ("training\non nodes 0, 2", _PROGRAM),
    )
    for place, (text, colour) in enumerate(steps):
        add_box(axes, (place * 2.2, 0.6), (1.7, 1.0), text, colour)
        if place:
            _arrow(axes, (place * 2.2 - 0.5, 1.1), (place * 2.2, 1.1))
    axes.plot([11.85, 11.85, 0.85], [0.6, 0.25, 0.25], color="black", linewidth=1)
    _arrow(axes, (0.85, 0.24), (0.85, 0.6))
    axes.text(6.35, -0.05, _BACK, ha="center", fontsize=8)
    return _trim(figure, axes, (-0.1, 12.8), (-0.2, 1.7))


def _empty(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _trim(figure: Figure, axes: Axes, across: tuple[float, float], up: tuple[float, float]) -> Figure:
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    axes.set_axis_off()
    return figure


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float]) -> None:
    axes.annotate("", stop, start, arrowprops={"arrowstyle": "->"})
