"""Moves that make a plan faster or smaller, and the climb that tries them.

`climb`: tries moves, the most promising first, and times each plan once. A file for each kind of move:
`layers`, between neighbouring stages, and how many are computed again; `memory`: ministages in turn or
interleaved, offload, and shares of the optimizer's state; `samples` in place of tokens; `experts`, whose rows
travel once to a node. `edit`: changes of a plan's stages.
"""

from megatron_hexi.planner.moves.climb import Climb, Move, Moves
from megatron_hexi.planner.moves.experts import ExpertMoves
from megatron_hexi.planner.moves.layers import layer_moves, recompute_moves
from megatron_hexi.planner.moves.memory import MemoryMoves, least_seconds, recomputes
from megatron_hexi.planner.moves.samples import sample_moves

__all__ = [
    "Climb",
    "ExpertMoves",
    "MemoryMoves",
    "Move",
    "Moves",
    "layer_moves",
    "least_seconds",
    "recompute_moves",
    "recomputes",
    "sample_moves",
]
