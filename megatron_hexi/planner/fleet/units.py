"""The units that a plan is made of: GPUs by tensor-parallel units, pipeline stacks and sites.

A unit is what one member of a plan stands for: `tensor_parallel` consecutive GPUs of one node for each
pipeline stage. Units on the same nodes are a site. Units are numbered in a canonical order (fast sites first,
then by what surrounds them), so that the order of a cluster file's entries does not decide anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import Job, ceiling_tokens_per_s
from megatron_hexi.cost.memory import ModelPart
from megatron_hexi.errors import ClusterError
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.layouts.experts import IN_WHOLE_STAGES, ExpertRule


@dataclass(frozen=True)
class Unit:
    """One member's GPUs.

    Args:
        gpus: the cluster's ranks, [stages][tensor_parallel].
        kind: what it is, an index into `Fleet.kinds`.
        site: where it is, a number shared by the units on the same nodes.
    """

    gpus: tuple[tuple[int, ...], ...]
    kind: int
    site: int


@dataclass(frozen=True)
class Kind:
    """Units that are alike.

    Args:
        devices: model of GPU on each stage.
        tokens_per_s: of the job's work, on one such unit alone at its best rates.
    """

    devices: tuple[Device, ...]
    tokens_per_s: float

    @property
    def name(self) -> str:
        """For people."""
        return " + ".join(dict.fromkeys(device.name for device in self.devices))


@dataclass(frozen=True)
class Fleet:
    """Units to plan for.

    Args:
        cluster: where they are.
        job: what they are for.
        kinds: the fastest first.
        units: in canonical order: units of a site follow each other.
        part: what units have of the model, where they are one stage of several that differ; ``None``: what
            the job says.
        experts: where the experts of a stage are, if the model has some.
    """

    cluster: Cluster
    job: Job
    kinds: tuple[Kind, ...]
    units: tuple[Unit, ...]
    part: ModelPart | None = None
    experts: ExpertRule = IN_WHOLE_STAGES

    def expert_weight(self, gpu: int) -> float:
        """What the number of experts of one of the cluster's GPUs is in proportion to."""
        device = self.cluster.ranks[gpu].device
        return device.usable_gib if self.experts.by == "memory" else max(device.layer_matmul.rates)

    @cached_property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Units of each site, numbered in this fleet, in canonical order."""
        sites: dict[int, list[int]] = {}
        for number, unit in enumerate(self.units):
            sites.setdefault(unit.site, []).append(number)
        return tuple(map(tuple, sites.values()))

    @cached_property
    def models(self) -> dict[tuple[Device, ...], tuple[int, ...]]:
        """Units of each model of GPU (or stack of models), the fastest first; equal entries are one model."""
        found: dict[tuple[Device, ...], list[int]] = {}
        of_kind = [found.setdefault(kind.devices, []) for kind in self.kinds]
        for number, unit in enumerate(self.units):
            of_kind[unit.kind].append(number)
        return {devices: tuple(units) for devices, units in found.items() if units}

    def kinds_of(self, units: Iterable[int]) -> tuple[int, ...]:
        """The kinds of some units, ascending."""
        return tuple(sorted(self.units[unit].kind for unit in units))

    def subset(self, units: Iterable[int]) -> Fleet:
        """Some of the units only."""
        return replace(self, units=tuple(self.units[number] for number in sorted(units)))

    def gpus(self, units: Sequence[int]) -> tuple[int, ...]:
        """The cluster's rank of each rank of a job on these units: Megatron's order, stage by stage."""
        stages = range(self.job.pipeline_parallel)
        return tuple(gpu for stage in stages for unit in units for gpu in self.units[unit].gpus[stage])

    @property
    def ceiling_tokens_per_s(self) -> float:
        """What no plan on these units can pass."""
        devices = [
            self.cluster.ranks[gpu].device for unit in self.units for part in unit.gpus for gpu in part
        ]
        return ceiling_tokens_per_s(self.job, devices)


def find_units(job: Job, cluster: Cluster, gpus: Collection[int] | None = None) -> Fleet:
    """All units that the cluster has for a job, or that some of its GPUs make.

    Pipeline stages are put on different nodes of one kind where their number allows it, so that a stage keeps
    whole nodes for its all-to-alls; else inside a node; else, where nothing else is left, on whatever
    follows.

    Raises:
        ClusterError: too few GPUs for a single unit, or a GPU that cannot do the job.
    """
    own = [[gpu for gpu in node.ranks if gpus is None or gpu in gpus] for node in cluster.nodes]
    runs = [_runs(of_node, job.tensor_parallel) for of_node in own]
    stacks = _stacks(job, cluster, runs)
    if not stacks:
        there = sum(map(len, runs))
        width, depth = (
            spell_flag(name, getattr(job, name)) for name in ("tensor_parallel", "pipeline_parallel")
        )
        raise ClusterError(
            f"{width}: cluster {cluster.name} has {there} groups of as many GPUs on one node, too few for "
            f"{depth}; give smaller sizes"
        )
    found = {_device_key(cluster, stack): stack for stack in stacks}
    kinds = {key: _kind(job, cluster, stack) for key, stack in found.items()}
    order = sorted(
        kinds, key=lambda key: (-kinds[key].tokens_per_s, *(device.name for device in kinds[key].devices))
    )
    units = _in_canonical_order(cluster, stacks, order)
    return Fleet(cluster, job, tuple(kinds[key] for key in order), units)


_Stack = tuple[tuple[int, ...], ...]


def _runs[T](things: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """Things that follow each other in runs of `size`; what is left over makes none."""
    return [tuple(things[first : first + size]) for first in range(0, len(things) - size + 1, size)]


def _stacks(job: Job, cluster: Cluster, runs: list[list[tuple[int, ...]]]) -> list[_Stack]:
    stages = job.pipeline_parallel
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, node in enumerate(cluster.nodes):
        alike[id(node.device), len(runs[number])].append(number)
    stacks: list[_Stack] = []
    rest: list[tuple[int, ...]] = []
    for nodes in alike.values():
        for across in _runs(nodes, stages):
            stacks += zip(*(runs[number] for number in across), strict=True)
        for number in nodes[len(nodes) - len(nodes) % stages :]:
            depth = len(runs[number]) // stages
            cut = [runs[number][stage * depth : (stage + 1) * depth] for stage in range(stages)]
            stacks += zip(*cut, strict=True)
            rest += runs[number][depth * stages :]
    return stacks + _runs(rest, stages)


def _kind(job: Job, cluster: Cluster, stack: _Stack) -> Kind:
    devices = tuple(cluster.ranks[part[0]].device for part in stack)
    alike = {id(device): device for device in devices}
    slowest = min(ceiling_tokens_per_s(job, [device]) for device in alike.values())
    return Kind(devices, slowest * job.tensor_parallel * job.pipeline_parallel)


def _device_key(cluster: Cluster, stack: _Stack) -> tuple[int, ...]:
    return tuple(id(cluster.ranks[part[0]].device) for part in stack)


def _measured(cluster: Cluster, node: int) -> list[float]:
    """With a measured matrix, what a node has to and from the others, the most first."""
    if not cluster.is_measured:
        return []
    here = cluster.nodes[node].ranks[0]
    others = [other.ranks[0] for number, other in enumerate(cluster.nodes) if number != node]
    ways = [(-cluster.bandwidth(*ends)) for other in others for ends in ((here, other), (other, here))]
    return sorted(ways)


def _in_canonical_order(
    cluster: Cluster, stacks: Sequence[_Stack], kinds: Sequence[tuple[int, ...]]
) -> tuple[Unit, ...]:
    """Sites sorted by kind, size and surroundings; those alike in all of it, by the file."""
    number_of_kind = {key: number for number, key in enumerate(kinds)}
    sites: dict[tuple[int, ...], list[_Stack]] = defaultdict(list)
    for stack in stacks:
        sites[tuple(cluster.ranks[part[0]].node for part in stack)].append(stack)

    def own(nodes: tuple[int, ...]) -> tuple[float, ...]:
        """Kind, size, and links: inside, and to other nodes, by cards or as measured."""
        kind = number_of_kind[_device_key(cluster, sites[nodes][0])]
        inside = [-cluster.nodes[node].bandwidth for node in nodes]
        cards = [cluster.nodes[node].cards for node in nodes]
        outside = [-one.bandwidth * one.count for one in cards if one is not None]
        return kind, -len(sites[nodes]), *inside, *outside, *_measured(cluster, nodes[0])

    def surroundings(nodes: tuple[int, ...]) -> tuple[object, ...]:
        """For each level, from outside in: who else is in the same part of it, then which part that is."""
        levels: list[object] = []
        for partition in reversed(cluster.fast_domains()[1:]):
            part = next(part for part in partition.parts if cluster.nodes[nodes[0]].ranks[0] in part)
            inside = {cluster.ranks[gpu].node for gpu in part}
            levels += [sorted(own(other) for other in sites if other[0] in inside), part[0]]
        return tuple(levels)

    around = len(cluster.fast_domains()) > 2
    order = sorted(sites, key=lambda nodes: (own(nodes), surroundings(nodes) if around else (), nodes))
    return tuple(
        Unit(stack, number_of_kind[_device_key(cluster, stack)], site)
        for site, nodes in enumerate(order)
        for stack in sites[nodes]
    )
