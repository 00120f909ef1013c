"""Days of a job on a cluster that changes: a plan that stays, one that follows, and the best. No torch."""

from megatron_hexi.lab.scenario.course import Course, Piece
from megatron_hexi.lab.scenario.events import Event
from megatron_hexi.lab.scenario.file import read_scenario
from megatron_hexi.lab.scenario.model import Scenario
from megatron_hexi.lab.scenario.play import Played, play_scenario

__all__ = ["Course", "Event", "Piece", "Played", "Scenario", "play_scenario", "read_scenario"]
