"""Units of a plan: GPUs as tensor-parallel units, stacked over pipeline stages, grouped by site.

A unit is what one member of a plan stands for: `tensor_parallel` consecutive GPUs of one node for each
pipeline stage. Units on the same nodes are a site. Units are numbered in a canonical order (fast sites first,
then by what surrounds them), so that the order of a cluster file's entries does not decide anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.cost.fp8 import has_fp8
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.errors import ClusterError
from megatron_hexi.grouping import grouped
from megatron_hexi.models import Job
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.terms import fp8_row_multiple
from megatron_hexi.planner.expert_placement import IN_WHOLE_STAGES, ExpertRule


@dataclass(frozen=True)
class FleetUnit:
    """The GPUs of one member of a plan.

    Args:
        gpus: its GPUs, numbered in the cluster, [stages][tensor_parallel].
        kind: its kind, an index into `Fleet.kinds`.
        site: its site, a number shared by the units on the same nodes.
    """

    gpus: tuple[tuple[int, ...], ...]
    kind: int
    site: int


@dataclass(frozen=True)
class UnitKind:
    """A kind of units: the same models of GPU on the same stages.

    Args:
        tokens_per_s: tokens/s of one such unit alone, if all its GPUs work at the slowest one's best rates.
    """

    devices: tuple[Device, ...]
    tokens_per_s: float

    @property
    def name(self) -> str:
        """Printable name."""
        return " + ".join(dict.fromkeys(device.name for device in self.devices))


@dataclass(frozen=True)
class Fleet:
    """The units that a cluster has for a job.

    Args:
        kinds: kinds of units, the fastest first.
        units: the units in canonical order: units of a site follow each other.
        part: the part of the model that units hold, if they are one of several unequal stages; ``None``: the
            part that the job gives each stage.
        experts: how experts are placed on the ranks of a stage, if the model has experts.
    """

    cluster: Cluster
    job: Job
    kinds: tuple[UnitKind, ...]
    units: tuple[FleetUnit, ...]
    part: ModelPart | None = None
    experts: ExpertRule = IN_WHOLE_STAGES

    @cached_property
    def row_step(self) -> int:
        """Number of tokens in whose multiples units get theirs, so that no row is padded."""
        devices = (device for kind in self.kinds for device in kind.devices)
        job = self.job
        in_fp8 = job.precision == "fp8" and any(has_fp8(device, job.fp8_recipe) for device in devices)
        return fp8_row_multiple(job.fp8_recipe, job.row_parts) if in_fp8 else 1

    def expert_weight(self, gpu: int) -> float:
        """Return the weight of one of the cluster's GPUs, to which its number of experts is proportional."""
        device = self.cluster.ranks[gpu].device
        match self.experts.by:
            case "speed":
                return max(device.layer_matmul.rates)
            case "memory":
                return device.usable_gib
            case "equal":
                return 1.0

    @cached_property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Units of each site, numbered in this fleet, in canonical order."""
        sites = grouped((unit.site, number) for number, unit in enumerate(self.units))
        return tuple(map(tuple, sites.values()))

    @cached_property
    def models(self) -> dict[tuple[Device, ...], tuple[int, ...]]:
        """Units of each model of GPU (or stack of models), the fastest first; equal entries are one model."""
        units_of: dict[tuple[Device, ...], list[int]] = {}
        of_kind = [units_of.setdefault(kind.devices, []) for kind in self.kinds]
        for number, unit in enumerate(self.units):
            of_kind[unit.kind].append(number)
        return {devices: tuple(units) for devices, units in units_of.items() if units}

    def kinds_of(self, units: Iterable[int]) -> tuple[int, ...]:
        """Return the kind of each of these units, in ascending order."""
        return tuple(sorted(self.units[unit].kind for unit in units))

    def subset(self, units: Iterable[int]) -> Fleet:
        """Return the fleet with only these units, renumbered in their order."""
        return replace(self, units=tuple(self.units[number] for number in sorted(units)))

    def gpus(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the cluster's GPU of each rank of a job on these units, in Megatron's order by stages."""
        stages = range(self.job.pipeline_parallel)
        return tuple(gpu for stage in stages for unit in units for gpu in self.units[unit].gpus[stage])

    @property
    def ceiling_tokens_per_s(self) -> float:
        """Tokens/s that no plan on these units exceeds."""
        devices = [
            self.cluster.ranks[gpu].device for unit in self.units for part in unit.gpus for gpu in part
        ]
        return ceiling_tokens_per_s(self.job, devices)


#: GPUs of a unit on each stage.
_Stack = tuple[tuple[int, ...], ...]


def find_units(job: Job, cluster: Cluster, gpus: Collection[int] | None = None) -> Fleet:
    """Return all units that the cluster, or a subset of its GPUs, has for a job.

    If the number of nodes of one kind allows it, pipeline stages are put on different nodes, so that a stage
    has whole nodes for its all-to-alls; else inside a node. Remaining GPUs are stacked in their order.

    Raises:
        ClusterError: too few GPUs for a single unit, or a GPU that cannot do the job.
    """
    gpus_by_node = [[gpu for gpu in node.ranks if gpus is None or gpu in gpus] for node in cluster.nodes]
    runs = [_runs(of_node, job.tensor_parallel) for of_node in gpus_by_node]
    stacks = _stacks(job, cluster, runs)
    if not stacks:
        there = sum(map(len, runs))
        width, depth = (
            spell_flag(name, getattr(job, name)) for name in ("tensor_parallel", "pipeline_parallel")
        )
        raise ClusterError(
            f"{width}: on the nodes of cluster {cluster.name} that makes {there} groups of GPUs, too few for "
            f"{depth}; give smaller sizes"
        )
    return _fleet_of(job, cluster, stacks)


def stages_in_turn(job: Job, cluster: Cluster, units: Sequence[tuple[int, ...]]) -> Fleet:
    """Return a fleet whose first stage has the first of these tensor-parallel units, and so on.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    each = len(units) // job.pipeline_parallel
    return _fleet_of(job, cluster, list(zip(*_runs(units, each), strict=True)))


def _fleet_of(job: Job, cluster: Cluster, stacks: Sequence[_Stack]) -> Fleet:
    stack_of = {_device_key(cluster, stack): stack for stack in stacks}
    kinds = {key: _kind(job, cluster, stack) for key, stack in stack_of.items()}
    order = sorted(
        kinds, key=lambda key: (-kinds[key].tokens_per_s, *(device.name for device in kinds[key].devices))
    )
    units = _in_canonical_order(cluster, stacks, order)
    return Fleet(cluster, job, tuple(kinds[key] for key in order), units)


def _runs[T](things: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """Return consecutive runs of `size` items; the remainder is dropped."""
    return [tuple(things[first : first + size]) for first in range(0, len(things) - size + 1, size)]


def _stacks(job: Job, cluster: Cluster, runs: list[list[tuple[int, ...]]]) -> list[_Stack]:
    stages = job.pipeline_parallel
    numbers = enumerate(cluster.nodes)
    alike = grouped(((id(node.device), len(runs[number])), number) for number, node in numbers)
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


def _kind(job: Job, cluster: Cluster, stack: _Stack) -> UnitKind:
    devices = tuple(cluster.ranks[part[0]].device for part in stack)
    alike = {id(device): device for device in devices}
    slowest = min(ceiling_tokens_per_s(job, [device]) for device in alike.values())
    return UnitKind(devices, slowest * job.tensor_parallel * job.pipeline_parallel)


def _device_key(cluster: Cluster, stack: _Stack) -> tuple[int, ...]:
    return tuple(id(cluster.ranks[part[0]].device) for part in stack)


def _measured(cluster: Cluster, node: int) -> list[float]:
    """Return negated measured bandwidths from a node to all others, fastest first; empty if not measured."""
    if not cluster.is_measured:
        return []
    here = cluster.nodes[node].ranks[0]
    others = [other.ranks[0] for number, other in enumerate(cluster.nodes) if number != node]
    ways = [(-cluster.bandwidth(*ends)) for other in others for ends in ((here, other), (other, here))]
    return sorted(ways)


def _in_canonical_order(
    cluster: Cluster, stacks: Sequence[_Stack], kinds: Sequence[tuple[int, ...]]
) -> tuple[FleetUnit, ...]:
    """Return units by site; sites are sorted by kind, size and surroundings, ties as in the file."""
    number_of_kind = {key: number for number, key in enumerate(kinds)}
    sites = grouped((tuple(cluster.ranks[part[0]].node for part in stack), stack) for stack in stacks)

    def site_key(nodes: tuple[int, ...]) -> tuple[float, ...]:
        """Return a site's kind, size and links, inside and to other nodes."""
        kind = number_of_kind[_device_key(cluster, sites[nodes][0])]
        inside = [-cluster.nodes[node].bandwidth for node in nodes]
        cards = [cluster.nodes[node].cards for node in nodes]
        outside = [-one.bandwidth * one.count for one in cards if one is not None]
        return kind, -len(sites[nodes]), *inside, *outside, *_measured(cluster, nodes[0])

    def surroundings(nodes: tuple[int, ...]) -> tuple[object, ...]:
        """Return the sites in each level's part around a site, from the outermost level inwards."""
        levels: list[object] = []
        for partition in reversed(cluster.fast_domains()[1:]):
            part = next(part for part in partition.parts if cluster.nodes[nodes[0]].ranks[0] in part)
            inside = {cluster.ranks[gpu].node for gpu in part}
            levels += [sorted(site_key(other) for other in sites if other[0] in inside), part[0]]
        return tuple(levels)

    around = len(cluster.fast_domains()) > 2
    order = sorted(sites, key=lambda nodes: (site_key(nodes), surroundings(nodes) if around else (), nodes))
    return tuple(
        FleetUnit(stack, number_of_kind[_device_key(cluster, stack)], site)
        for site, nodes in enumerate(order)
        for stack in sites[nodes]
    )
