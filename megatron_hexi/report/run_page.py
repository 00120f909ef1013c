"""A run as one HTML page without network or scripts; pictures are SVG in the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

import megatron_hexi
from megatron_hexi.cost import IterationCost
from megatron_hexi.plan import Plan
from megatron_hexi.report.estimate import phases_line
from megatron_hexi.report.pictures import draw_plan, read_as_written
from megatron_hexi.report.run_pictures import draw_course, draw_memory, draw_ranks
from megatron_hexi.report.run_summary import Run
from megatron_hexi.report.unit_summary import UnitSummary, unit_summaries
from megatron_hexi.spelling import spell_range, spell_seconds

_TEMPLATE = "run.html.j2"
_TABLE = "The numbers are in the table below."
#: Names and references in an SVG.
_NAMES = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True)
class Picture:
    """A drawing in the page."""

    svg: Markup
    alt: str


def run_page(
    run: Run,
    plan: Plan,
    title: str,
    cost: IterationCost | None = None,
    timeline: Figure | None = None,
    simulated_s: float | None = None,
) -> str:
    """Return the page.

    Args:
        cost: the cost model's prediction, if any.
        timeline: picture of a simulated iteration; ``None`` without a simulation.
        simulated_s: seconds of the simulated iteration.
    """
    rows = unit_summaries(plan)
    gpus = [rank.device for rank in cost.ranks] if cost else []
    pictures = {
        "plan": _picture("plan", draw_plan(plan, rows, gpus), _plan_alt(rows)),
        "ranks": _picture("ranks", draw_ranks(run.ranks), f"Busy and waiting time of each rank. {_TABLE}"),
        "memory": _picture("memory", draw_memory(run.ranks), f"Memory of each rank. {_TABLE}"),
        "course": _picture("course", draw_course(run), _course_alt(run)),
    }
    if timeline is not None:
        alt = (
            "A simulated iteration: micro-batches by stage, and what each rank computes and sends in a layer."
        )
        pictures["timeline"] = _picture("timeline", timeline, alt)
    page = Environment(
        loader=PackageLoader("megatron_hexi.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "seconds": spell_seconds,
        "share": lambda value: "–" if value is None else f"{value:.1%}",
        "gib": lambda value: "–" if value is None else f"{value:.2f}",
        "count": lambda value: f"{value:,.0f}",
        "heads": spell_range,
    }
    return page.get_template(_TEMPLATE).render(
        run=run,
        plan=plan,
        units=rows,
        title=title,
        pictures=pictures,
        last_loss=next((loss for loss in reversed(run.losses) if loss is not None), None),
        phases=None if cost is None else phases_line(cost),
        simulated_s=simulated_s,
        version=megatron_hexi.__version__,
    )


def _picture(name: str, figure: Figure, alt: str) -> Picture:
    out = io.StringIO()
    read_as_written(figure)
    # Text stays text: it can be read, found and copied, and takes a tenth of the space.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    svg = _NAMES.sub(rf"\g<1>{name}-", text[text.index("<svg") :])  # a page's names must all differ
    return Picture(Markup(svg), alt)


def _plan_alt(rows: Sequence[UnitSummary]) -> str:
    tokens = ", ".join(f"rank {row.rank}: {row.tokens:,} tokens" for row in rows[:16])
    return f"Who holds which part of the sequence and which heads. {tokens}."


def _course_alt(run: Run) -> str:
    known = [loss for loss in run.losses if loss is not None]
    course = f"from {known[0]:.4g} to {known[-1]:.4g}" if known else "not finite"
    return f"Curves over {len(run.iterations)} iterations: the loss {course}, and the seconds of each."
