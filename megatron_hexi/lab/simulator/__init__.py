"""A plan replayed event by event: who computes, who sends, and who waits for whom. No torch here."""

from megatron_hexi.lab.simulator.difference import Difference, compare_with_model
from megatron_hexi.lab.simulator.iteration import simulate
from megatron_hexi.lab.simulator.simulation import (
    Findings,
    LinkUse,
    Meeting,
    PipelineSpan,
    RankTimeline,
    Scattering,
    Simulation,
    Span,
)
from megatron_hexi.lab.simulator.trace import chrome_trace

__all__ = [
    "Difference",
    "Findings",
    "LinkUse",
    "Meeting",
    "PipelineSpan",
    "RankTimeline",
    "Scattering",
    "Simulation",
    "Span",
    "chrome_trace",
    "compare_with_model",
    "simulate",
]
