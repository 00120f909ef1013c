"""Days of a job on a cluster that changes: a plan that stays, one that follows, and the best. No torch."""

from megatron_hexi.scenario.course import Course, Piece
from megatron_hexi.scenario.events import Event
from megatron_hexi.scenario.file import read_scenario
from megatron_hexi.scenario.model import Scenario
from megatron_hexi.scenario.play import Played, play_scenario

__all__ = ["Course", "Event", "Piece", "Played", "Scenario", "play_scenario", "read_scenario"]
