"""Lower bounds of the memory of a plan's stages, to skip timing options that cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.experts import section_holdings
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import part_host_memory, part_memory, part_params
from megatron_hexi.cost.model_part import ModelPart, Present
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.planner.joint import Candidate


class MemoryOption(NamedTuple):
    """Recomputation and offload of a stage, to save memory."""

    recompute: Recompute
    offload: tuple[Offload, ...] = ()


class LeastMemory:
    """Lower bounds of the memory of a plan's stages, without optimizer state and message buffers.

    Args:
        base: the plan, with its timing.
        hosts: the hosts in whose memory offloaded activations wait.
    """

    def __init__(self, base: Candidate, hosts: Hosts) -> None:
        timing, self._hosts, self._over = base.timing, hosts, cache(self._overfull)
        self._plan, self._part = base.plan, cache(self._in_ministages)
        self._sections = [
            (section, section_holdings(section, timing.micro_batches, cost.flights, experts))
            for section, cost, experts in zip(timing.sections, timing.stages, timing.experts, strict=True)
        ]

    def may_fit(self, ministages: int, options: Sequence[MemoryOption]) -> list[set[tuple[int, int]]]:
        """Return, for each option, the stages that may fit with it, as (replica, number of the stage).

        All sets are empty if offloaded activations overfill a host.

        Args:
            ministages: ministages of each stage; 0: stages run whole.
        """
        stages = {
            (replica, section.number) for section, _ in self._sections for replica in section.replica.tolist()
        }
        fitting_stages, waiting = [set(stages) for _ in options], []
        for number, (section, held) in enumerate(self._sections):
            on_host = np.array(True)
            for option, fitting in zip(options, fitting_stages, strict=True):
                with_rows = "activations" not in option.offload
                over = self._over(number, ministages, option.recompute, with_rows)
                fitting -= {(replica, section.number) for replica in section.replica[over].tolist()}
                on_host = on_host & over if with_rows else on_host
            part = replace(self._part(number, ministages), rows_on_host=on_host)
            waiting.append(part_host_memory(section.job, part, held, _present(0.0, 0.0))["activations"])
        loads = self._hosts.loads([section.placement.gpus for section, _ in self._sections], waiting)
        return [set() for _ in options] if any(load.fullness > 1 for load in loads) else fitting_stages

    def _overfull(self, number: int, ministages: int, recompute: Recompute, with_rows: bool) -> Bools:
        """Return whether each unit of a section exceeds its memory, [U]."""
        section, held = self._sections[number]
        job, again = replace(section.job, recompute=recompute), section.part.layers * (recompute != "none")
        part = replace(self._part(number, ministages), again=again, rows_on_host=not with_rows)
        params = part_params(job, part, held.experts)
        present = _present(params, params)
        if ministages:  # weights of two in a row; gradients of two as well, if there are three
            alone = [part_params(job, part.range_alone(ministage)) for ministage in range(ministages)]
            ministage_params = np.min(alone, axis=0)
            present = _present(2 * ministage_params, ministage_params * min(ministages - 1, 2))
        terms = part_memory(job, part, held, section.window, 0.0, present)
        return np.sum(list(terms.values()), axis=0) > section.placement.usable

    def _in_ministages(self, number: int, count: int) -> ModelPart:
        """Return the units' parts of the model with a section cut into `count` ministages; 0: uncut."""
        section, ranges = self._sections[number][0], []
        if not count:
            return replace(section.part, ministages=0)
        for replica in (self._plan.replicas[one] for one in section.replicas.tolist()):
            stages = tuple(replace(stage, ministages=count) for stage in replica.stages)
            ranges.append(replace(replica, stages=stages).ministage_layers(section.number))
        units = np.array(ranges)[section.arrays.unit_replica]
        return replace(section.part, ministages=count, ranges=units)


def _present(weights: Floats | Ints | float, gradients: Floats | Ints | float) -> Present:
    none = np.zeros(1)
    return Present(weights + none, gradients + none, none, none, none, none, none)
