"""What the drawings share: colours, the small plan that they show, and the same bytes every time."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from megatron_hexi.plan import Domain, Workload, proportional_domain
from megatron_hexi.plan.model import Range

#: One for each group; the first three of ColorBrewer's Dark2, which the colour-blind tell apart.
GROUP_COLOURS = ("#1b9e77", "#d95f02", "#7570b3")
#: What is not talked about.
FAINT = "#d9d9d9"

#: Three groups of two, two and one ranks, on a sequence that fits on paper.
WORKLOAD = Workload(seq_length=60, heads=6, kv_heads=6, head_dim=64)
SPEEDS = ((3, 2), (2, 1), (2,))


def small_domain() -> Domain:
    """The groups of `SPEEDS`: 30, 18 and 12 tokens."""
    return proportional_domain(WORKLOAD, SPEEDS)


def as_svg(figure: Figure) -> str:
    """A figure as SVG; the same figure gives the same text."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "megatron-hexi", "svg.fonttype": "path", "path.simplify": False}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def add_rectangle(axes: Axes, across: Range, down: Range, colour: str, **style: object) -> None:
    """Every position of `down` against every one of `across`."""
    size = (across[1] - across[0], down[1] - down[0])
    axes.add_patch(Rectangle((across[0], down[0]), *size, facecolor=colour, linewidth=0.6, **style))  # type: ignore[arg-type]


def add_triangle(axes: Axes, at: Range, colour: str) -> None:
    """A causal square: every position against itself and earlier ones."""
    start, stop = at
    corners = [(start, start), (start, stop), (stop, stop)]
    axes.add_patch(Polygon(corners, facecolor=colour, edgecolor="white", linewidth=0.6))


def set_up_mask(axes: Axes, tokens: int, title: str) -> None:
    """Axes for queries (down) against keys (across)."""
    axes.set_xlim(0, tokens)
    axes.set_ylim(tokens, 0)
    axes.set_aspect("equal")
    axes.set_xticks([0, tokens])
    axes.set_yticks([0, tokens])
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def visible(queries: Range, keys: Sequence[Range]) -> list[Range]:
    """The key segments that end before a query segment begins: the queries see all of each."""
    return [segment for segment in keys if segment[1] <= queries[0]]


def add_box(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, colour: str
) -> None:
    """A named box; its lower left corner, its width and height."""
    axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="#555555", linewidth=0.8))
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=8)
