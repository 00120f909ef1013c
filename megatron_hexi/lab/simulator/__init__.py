"""Simulation of an iteration of a plan, event by event: computing, sending and waiting. No torch here."""

from megatron_hexi.lab.simulator.drawn_documents import DrawnDocuments, draw_documents
from megatron_hexi.lab.simulator.simulated_iteration import simulate
from megatron_hexi.lab.simulator.simulation import (
    LinkUse,
    PhaseComparison,
    RankTimeline,
    Simulation,
    Span,
    compare_with_model,
)
from megatron_hexi.lab.simulator.trace import chrome_trace

__all__ = [
    "DrawnDocuments",
    "LinkUse",
    "PhaseComparison",
    "RankTimeline",
    "Simulation",
    "Span",
    "chrome_trace",
    "compare_with_model",
    "draw_documents",
    "simulate",
]
