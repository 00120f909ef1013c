"""What of the documentation is generated, and from what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.docs.combinations_page import combinations_page
from scripts.docs.commands_page import commands_page
from scripts.docs.draw_exchange import draw_exchange
from scripts.docs.draw_flows import draw_job, draw_node_failure
from scripts.docs.draw_layout import draw_all_to_all, draw_layout
from scripts.docs.draw_packages import draw_packages
from scripts.docs.draw_pass import draw_pass
from scripts.docs.draw_resources import draw_memory, draw_time
from scripts.docs.draw_schedules import draw_schedules
from scripts.docs.drawing import as_svg
from scripts.docs.field_pages import cluster_fields_page, plan_fields_page, scenario_fields_page
from scripts.docs.options_page import options_page
from scripts.docs.training_page import training_page

DOCS = Path(__file__).parents[2] / "docs"

#: The text of each file below docs/, by its name there.
GENERATED: Mapping[str, Callable[[], str]] = {
    "options.md": options_page,
    "reference/commands.md": commands_page,
    "reference/plan-file.md": plan_fields_page,
    "reference/cluster-file.md": cluster_fields_page,
    "reference/scenario-file.md": scenario_fields_page,
    "reference/training.md": training_page,
    "reference/combinations.md": combinations_page,
    "images/job.svg": lambda: as_svg(draw_job()),
    "images/packages.svg": lambda: as_svg(draw_packages()),
    "images/attention-pass.svg": lambda: as_svg(draw_pass()),
    "images/node-failure.svg": lambda: as_svg(draw_node_failure()),
    "images/layout.svg": lambda: as_svg(draw_layout()),
    "images/all-to-all.svg": lambda: as_svg(draw_all_to_all()),
    "images/exchange.svg": lambda: as_svg(draw_exchange()),
    "images/schedules.svg": lambda: as_svg(draw_schedules()),
    "images/time.svg": lambda: as_svg(draw_time()),
    "images/memory.svg": lambda: as_svg(draw_memory()),
}
