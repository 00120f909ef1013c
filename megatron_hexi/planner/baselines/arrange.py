"""Orders of machines, equal replicas, and groups of a replica, as baselines use them.

Baselines assign consecutive ranks. A machine's GPUs stay together, in Megatron's order, but users choose the
order of machines (in a host file). So a baseline is tried with several orders, and the order in the cluster
file does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hexi.cluster import Cluster
from megatron_hexi.planner.fleet.units import Fleet

#: Units in the order of their ranks.
Order = tuple[int, ...]
#: The units of each replica, each in the order of their ranks.
ReplicaUnits = tuple[Order, ...]


def orders(fleet: Fleet) -> dict[str, Order]:
    """Return orders of all units, machine by machine, by a printable name.

    The first order has fast machines first, and an empty name.
    """
    sites = [sorted(site, key=lambda unit: fleet.units[unit].gpus) for site in fleet.sites]
    paths = _paths(fleet, sites)
    domains = sorted(range(len(sites)), key=lambda site: (*paths[site], site))
    model_of = {unit: number for number, units in enumerate(fleet.models.values()) for unit in units}
    alike = [(model_of[site[0]], len(site)) for site in sites]
    name_of: dict[Order, str] = {}
    for name, ways in (("", range(len(sites))), ("domain by domain", domains)):
        name_of.setdefault(_join(sites, ways), name)
        backwards = ways[::-1]
        if [alike[site] for site in ways] != [alike[site] for site in backwards]:
            name_of.setdefault(_join(sites, backwards), f"{name}, slow first" if name else "slow first")
    return {name: order for order, name in name_of.items()}


def equal_replicas(fleet: Fleet, count: int, order: Order) -> Iterator[ReplicaUnits]:
    """Yield the units divided into `count` equal replicas.

    Units are divided in the given order and, if those of every GPU model divide evenly, also with the same
    mix of models in each replica.
    """
    yield _runs(order, count)
    owned = fleet.models.values()
    if count > 1 and len(owned) > 1 and not any(len(units) % count for units in owned):
        place = {unit: number for number, unit in enumerate(order)}
        shares = [_runs(sorted(units, key=lambda unit: place[unit]), count) for units in owned]
        mixed = [[unit for share in shares for unit in share[replica]] for replica in range(count)]
        yield tuple(tuple(sorted(units, key=lambda unit: place[unit])) for units in mixed)


def nodes_of_one_model(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return sets of nodes with GPUs of one model: all such nodes, and those of each size if sizes differ.

    Users leave out a node with fewer GPUs if it would limit the tensor-parallel size of the other nodes.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        for key in ((id(node.device),), (id(node.device), len(node.ranks))):
            sets.setdefault(key, []).append(number)
    return list(dict.fromkeys(map(tuple, sets.values())))


def groups(units: Order, degree: int, strided: bool) -> list[Order]:
    """Return groups of `degree` units: consecutive or, if `strided`, at equal distances in the order."""
    if strided:
        return [units[first :: len(units) // degree] for first in range(len(units) // degree)]
    return [units[first : first + degree] for first in range(0, len(units), degree)]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _paths(fleet: Fleet, sites: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return each site's part of every level, outermost level first; a part is named by its first site."""
    paths: list[list[int]] = [[] for _ in sites]
    firsts = [fleet.units[site[0]].gpus[0][0] for site in sites]
    for partition in reversed(fleet.cluster.fast_domains()[1:]):
        part_of = {gpu: number for number, part in enumerate(partition.parts) for gpu in part}
        leader: dict[int, int] = {}
        for site, gpu in enumerate(firsts):
            paths[site].append(leader.setdefault(part_of[gpu], site))
    return [tuple(path) for path in paths]


def _join(sites: Sequence[Sequence[int]], order: Sequence[int]) -> Order:
    return tuple(unit for site in order for unit in sites[site])


def _runs(units: Sequence[int], count: int) -> ReplicaUnits:
    size = len(units) // count
    return tuple(tuple(units[first * size : (first + 1) * size]) for first in range(count))
