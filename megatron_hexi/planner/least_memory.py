"""What the stages of a plan need at least with what saves memory: most that does not fit is not timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.experts import section_holdings
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import Present, part_host_memory, part_memory, part_params
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.planner.joint import Candidate


class Rung(NamedTuple):
    """What a stage does to need less memory."""

    recompute: Recompute
    offload: tuple[Offload, ...] = ()


class LeastMemory:
    """Of one plan's stages. It leaves out the optimizer's state and messages' buffers.

    Args:
        base: the plan.
        hosts: in whose memory rows wait.
    """

    def __init__(self, base: Candidate, hosts: Hosts) -> None:
        timing, self._hosts, self._over = base.timing, hosts, cache(self._overfull)
        self._sections = [
            (section, section_holdings(section, timing.micro_batches, cost.flights, experts))
            for section, cost, experts in zip(timing.sections, timing.stages, timing.experts, strict=True)
        ]

    def may_fit(self, ministages: int, rungs: Sequence[Rung]) -> list[set[tuple[int, int]]]:
        """Replica and number of the stages that may fit on each rung; none where rows overfill a host.

        Args:
            ministages: of each stage; 0: it runs whole.
            rungs: what stages may do.
        """
        stages = {(one, section.number) for section, _ in self._sections for one in section.replica.tolist()}
        found, waiting = [set(stages) for _ in rungs], []
        for number, (section, held) in enumerate(self._sections):
            on_host = np.array(True)
            for rung, fitting in zip(rungs, found, strict=True):
                with_rows = "activations" not in rung.offload
                over = self._over(number, ministages, rung.recompute, with_rows)
                fitting -= {(one, section.number) for one in section.replica[over].tolist()}
                on_host = on_host & over if with_rows else on_host
            part = replace(section.part, ministages=ministages, rows_on_host=on_host)
            waiting.append(part_host_memory(section.job, part, held, _present(0.0, 0.0))["activations"])
        loads = self._hosts.loads([section.placement.gpus for section, _ in self._sections], waiting)
        return [set() for _ in rungs] if any(load.fullness > 1 for load in loads) else found

    def _overfull(self, number: int, ministages: int, recompute: Recompute, with_rows: bool) -> Bools:
        """Units of a section that have no room, [U]; whether rows that wait are on the device, too."""
        section, held = self._sections[number]
        job, again = replace(section.job, recompute=recompute), section.part.layers * (recompute != "none")
        part = replace(section.part, again=again, ministages=ministages, rows_on_host=not with_rows)
        params = part_params(job, part, held.experts)
        present = _present(params, params)
        if ministages:  # of two that follow one another, and both gradients where a third does
            own = part_params(
                job, replace(part, layers=part.layers // ministages, is_first=False, is_last=False)
            )
            present = _present(2 * own, own * min(ministages - 1, 2))
        terms = part_memory(job, part, held, section.window, 0.0, present)
        return np.sum(list(terms.values()), axis=0) > section.placement.usable


def _present(weights: Floats | Ints | float, gradients: Floats | Ints | float) -> Present:
    none = np.zeros(1)
    return Present(weights + none, gradients + none, none, none, none, none, none)
