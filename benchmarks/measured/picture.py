"""Each layout's tokens/s as parts of the ceiling: measured as bars, predicted as marks."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.measured.results import ScenarioResult

_OURS, _UNIFORM, _OTHERS = "#c0392b", "#9fb4c7", "#d9c7a0"


def draw_scenarios(results: Mapping[str, ScenarioResult]) -> Figure:
    """One panel a scenario."""
    figure = Figure(figsize=(9, 0.9 + 2.1 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        ran = [layout for layout in result.layouts if layout.median_s is not None][::-1]
        rates = [result.tokens_per_s(layout) for layout in ran]
        plan = None if any(result.compared()) else result.plan
        colours = [_OURS if layout is plan else _UNIFORM if layout.uniform else _OTHERS for layout in ran]
        places = range(len(ran))
        axes.barh(places, rates, color=colours, height=0.7)
        predicted = [result.batch * result.seq_length / layout.predicted_s for layout in ran]
        axes.plot(predicted, places, "D", color="black", markersize=4, label="predicted")
        axes.axvline(result.ceiling_tokens_per_s, color="black", linestyle=":", label="ceiling")
        axes.set_yticks(places, [layout.name for layout in ran])
        axes.set_title(f"{name}: {result.seq_length} tokens", loc="left", fontsize=10)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens/s (red: the plan; blue: equal parts for all; sand: others)")
    panels[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)
    return figure
