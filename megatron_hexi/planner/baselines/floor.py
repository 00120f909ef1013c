"""Lower bounds of layouts' seconds and memory, so that most layouts need not be timed.

    group     >= the longest of its members' token work + the longest of their attention
    stage     >= its slowest group; the last one's with the longest logits
    replica   >= micro-batches x slowest stage + a micro-batch, or a chunk of it, on the others
    iteration >= slowest replica

Products take the time of each member's rows, attention that of its GPU's best rate. Communication and the
keys in flight are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cost import attention_seconds
from megatron_hexi.cost.arrays import Bools, Floats
from megatron_hexi.cost.compute import device_speeds, logits_times, token_times
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, owned_params, part_memory, part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout


class Floor:
    """Lower bounds for several candidates on one fleet.

    Args:
        fleet: the fleet whose units the layouts number.
        candidates: layouts of each candidate, one for each replica; they take all units.
    """

    def __init__(self, fleet: Fleet, candidates: Sequence[Sequence[Layout]]) -> None:
        self._job, self._units = fleet.job, len(fleet.units)
        layouts = [layout for candidate_layouts in candidates for layout in candidate_layouts]
        parts = [part for layout in layouts for part in layout.parts]
        units, self._tokens, self._heads = (
            np.array([value for part in parts for value in getattr(part, name)])
            for name in ("units", "tokens", "heads")
        )
        sizes, groups = (
            np.array([len(each) for each in which])
            for which in ([part.units for part in parts], [layout.parts for layout in layouts])
        )
        #: First member of each group, first group of each replica, first replica of each candidate.
        self._group, self._replica = np.cumsum(sizes) - sizes, np.cumsum(groups) - groups
        replicas = np.array([len(each) for each in candidates])
        self._candidate = np.cumsum(replicas) - replicas
        self._totals = np.repeat(np.add.reduceat(self._tokens, self._group), sizes)
        self._micro_batches = np.array([layout.micro_batches for layout in layouts])
        self._shares = np.repeat(np.repeat(self._micro_batches, groups), sizes)
        #: Whether each member's group is its replica's only one, [members].
        self._alone = np.repeat(np.repeat(groups == 1, groups), sizes)
        devices = {id(device): device for kind in fleet.kinds for device in kind.devices}
        numbers = [[list(devices).index(id(device)) for device in kind.devices] for kind in fleet.kinds]
        #: Number of each member's device on each stage, [S, members].
        self._device = np.array([numbers[unit.kind] for unit in fleet.units]).T[:, units]
        self._usable = np.array([device.usable_gib for device in devices.values()])
        self._speeds = [device_speeds(device, fleet.job) for device in devices.values()]

    def seconds(self) -> Floats:
        """Return a lower bound of each candidate's seconds, infinite where Megatron cannot interleave it."""
        job, member = self._job, np.arange(len(self._tokens))
        rows = job.micro_batch_size * self._tokens.astype(float)
        share = self._heads / (job.workload().local_heads * job.tensor_parallel)
        queries = job.micro_batch_size * self._totals * share
        token = attention = np.zeros(self._device.shape)
        part = ModelPart.of_job(job, np.arange(job.pipeline_parallel))
        for kind, held in zip(job.kinds, part.of_kinds(job.model), strict=True):
            layers, again = (np.reshape(count, (-1, 1)) for count in held)
            forward, backward = np.array([token_times(own, kind, rows) for own in self._speeds])[
                self._device, :, member
            ].transpose(2, 0, 1)
            token = token + layers * (forward + backward) + again * (kind.mode == "full") * forward
            once, twice = (
                np.array([attention_seconds(own, each, True) for own in self._speeds])[self._device]
                / sum(each.model.layers_run)
                for each in (replace(kind, recompute="none"), kind)
            )
            # In a window the first of several groups sees fewer keys.
            seen = queries if kind.model.window is None else queries * self._alone
            attention = attention + (layers * once + again * (twice - once)) * seen
        slowest = np.maximum.reduceat(token, self._group, axis=1)
        slowest += np.maximum.reduceat(attention, self._group, axis=1)
        stages = np.maximum.reduceat(slowest, self._replica, axis=1)
        logits = np.array([sum(logits_times(own, job, rows)) for own in self._speeds])
        stages[-1] += np.maximum.reduceat(logits[self._device[-1], member], self._group[self._replica])
        longest = stages.max(axis=0)
        seconds = self._micro_batches * longest + (stages.sum(axis=0) - longest) / job.virtual_stages
        if job.virtual_stages > 1:
            seconds[self._micro_batches % job.pipeline_parallel != 0] = np.inf
        return np.maximum.reduceat(seconds, self._candidate)

    def may_fit(self) -> Bools:
        """Return whether each candidate may fit in memory."""
        job = self._job
        held = Holdings(
            tokens=self._tokens.astype(float),
            group_tokens=self._totals.astype(float),
            heads=self._heads.astype(float),
            kv=self._heads / job.workload().queries_per_kv,
            micro_batches=self._shares,
            flights=Flights(np.zeros(1), np.zeros(1)),
            fp8_copies=np.array([own.fp8_copies for own in self._speeds])[self._device],
        )
        part = ModelPart.of_job(job, np.arange(job.pipeline_parallel)[:, None])
        owned = owned_params(job, part_params(job, part), self._units)
        needed = sum(part_memory(job, part, held, 1, owned).values())
        fits = (needed <= GIB * self._usable[self._device]).all(axis=0)
        return np.logical_and.reduceat(fits, self._group[self._replica[self._candidate]])
