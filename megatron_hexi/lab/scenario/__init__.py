"""Simulation of days of a job on a changing cluster, under three policies. No torch here."""

from megatron_hexi.lab.scenario.course import Course, CoursePiece, PlayedScenario, play_scenario
from megatron_hexi.lab.scenario.events import Event, read_scenario
from megatron_hexi.lab.scenario.scenario_model import Scenario

__all__ = ["Course", "CoursePiece", "Event", "PlayedScenario", "Scenario", "play_scenario", "read_scenario"]
