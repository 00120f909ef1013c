"""Baselines by name, and their layouts."""

from dataclasses import replace

from megatron_hexi.planner import CHOSEN, Request
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.planner.baselines.flags import FlagLayout
from megatron_hexi.planner.baselines.rules import NAMES, consecutive, replica_counts
from megatron_hexi.planner.baselines.rules import candidates as candidates_of
from megatron_hexi.planner.fleet.units import find_units, stages_in_turn
from tests.support.costs import cluster, tiny_job


def fleet_of(nodes, job=None, **network):
    return find_units(job or tiny_job(), cluster(nodes, **network))


def all_fixed(job, data_parallel=1):
    """A request with none of Megatron's flags left to choose; replicas are, where they are ``None``."""
    if data_parallel is None:
        return Request(job, frozenset(CHOSEN) - {"data_parallel"})
    return Request(replace(job, data_parallel=data_parallel), frozenset(CHOSEN))


def candidates(fleet, data_parallel, names=NAMES):
    """All layouts of so many replicas; ``None``: of any number."""
    return candidates_of(fleet, replica_counts(fleet, data_parallel), names)


def by_name(request, known, **others):
    """Return the baselines that follow rules; uneven layers have tests of their own."""
    return {one.name: one for one in find_baselines(request, known, **others)[0] if one.name in NAMES}


def found(fleet, data_parallel=1, **others):
    return by_name(all_fixed(fleet.job, data_parallel), fleet.cluster, **others)


def shapes(fleet, name, data_parallel=1):
    """(replicas, groups of each, size of each) that a baseline may use."""
    return {
        (len(one.layouts), len(one.layouts[0].parts), len(one.layouts[0].parts[0].units))
        for one in candidates(fleet, data_parallel)
        if name in one.texts
    }


def groups(fleet, name):
    """The groups' units of each layout that a baseline may use on one replica."""
    return {
        tuple(part.units for part in one.layouts[0].parts)
        for one in candidates(fleet, 1)
        if name in one.texts
    }


def expert_layout(job, known, width, depth, context, expert, group):
    """The layout of these parallel sizes on all GPUs, stage after stage."""
    flags = replace(job, tensor_parallel=width, pipeline_parallel=depth)
    units = [tuple(range(first, first + width)) for first in range(0, len(known.ranks), width)]
    fleet = stages_in_turn(flags, known, units)
    return FlagLayout(fleet, consecutive(fleet, len(fleet.units) // context, group), expert=expert)
