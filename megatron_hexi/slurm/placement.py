"""Place ranks on the hosts of a Slurm job, and complete the arguments of its training run for restarts.

A name of the cluster file stands for

1. the host that the file names (`hosts`), or that is called so, where the job has it;
2. else, where Slurm knows that host, any host of the job that Slurm describes alike (the same partitions,
   features and generic resources), because a job seldom gets the nodes that were measured;
3. else, where the file names no host, any host of the job with a feature, or in a partition, of that name;
4. else, where nothing is called so, any host of the job whose generic resources have the node's GPUs, and no
   others of the file.

Nodes that the plan does not use need no host; they may be the spares of an elastic job. GPUs of a node are
alike, so a rank has a host, not a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.argument_file import last_value
from megatron_hexi.cluster import Cluster, NodeEntry, cluster_digest
from megatron_hexi.errors import ClusterError, HexiError, PlanError, PlatformError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import covers_gpus, rank_gpus, spell_ranks
from megatron_hexi.slurm.nodes import SlurmNode, gpus_of
from megatron_hexi.spelling import first_few

#: What Slurm knows of each host, by name.
SlurmNodes = Mapping[str, SlurmNode]


@dataclass(frozen=True)
class Placed:
    """The hosts of ranks and of the cluster file's nodes.

    Args:
        spares: the host of each node that the plan does not use and that waits as a spare, in file order.
        absent: hosts that the cluster file names and the job lacks, with the host that stands in for each.
    """

    hosts: tuple[str, ...]
    nodes: Mapping[str, str]
    spares: Mapping[str, str]
    idle: tuple[str, ...]
    absent: Mapping[str, str]


def place(
    plan: Plan, cluster: Cluster, slurm_nodes: SlurmNodes, hosts: Sequence[str], with_spares: bool = False
) -> Placed:
    """Find a host for every rank.

    Args:
        with_spares: whether hosts without ranks wait as spares, as far as the cluster file has them.
    """
    unknown = next((host for host in hosts if host not in slurm_nodes), None)
    if unknown is not None:
        remedy = "pipe in that of sinfo --all"
        raise PlatformError(f"the job's host {unknown} is missing in sinfo's output; {remedy}")
    entries = [entry for entry in cluster.file.nodes for _ in range(entry.count)]
    nodes = [
        _Node(node.name, entry, host)
        for node, entry, host in zip(cluster.nodes, entries, cluster.file.hosts, strict=True)
    ]
    node_of = [cluster.ranks[gpu].node for gpu in find_gpus(plan, cluster)]
    used = [nodes[number] for number in sorted(set(node_of))]
    host_of = _assign(used, nodes, slurm_nodes, hosts)
    _check_stand_ins(nodes, host_of, slurm_nodes)
    placed = tuple(host_of[nodes[number].name] for number in node_of)
    spares = _find_spares(nodes, host_of, slurm_nodes, hosts) if with_spares else {}
    idle = tuple(host for host in hosts if host not in {*placed, *spares.values()})
    absent = {node.host: host_of[node.name] for node in used if node.host not in (None, host_of[node.name])}
    return Placed(placed, host_of, spares, idle, absent)


@dataclass(frozen=True)
class _Node:
    """A node of the cluster file: its numbered name, its entry, and its host if the file says it."""

    name: str
    entry: NodeEntry
    host: str | None

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of hosts that are this node and no other."""
        if self.host is not None:
            return (self.host,)
        return (self.entry.name, self.name) if self.entry.count == 1 else (self.name,)

    @property
    def hardware(self) -> tuple[str, int]:
        """GPU and number of GPUs, which must be equal on a stand-in."""
        return self.entry.gpu, self.entry.gpus

    def named(self, names: Iterable[str]) -> str | None:
        """Return the host among these that has a name of this node."""
        return next((name for name in self.host_names if name in names), None)

    def is_called_so(self, slurm_nodes: SlurmNodes) -> bool:
        """Return whether Slurm has a host, a feature or a partition of a name of this node."""
        return self.named(slurm_nodes) is not None or any(
            described.is_called(self.entry.name) for described in slurm_nodes.values()
        )


def find_gpus(plan: Plan, cluster: Cluster) -> Sequence[int]:
    """Return the cluster's GPU of each rank."""
    origin, digest = plan.provenance, cluster_digest(cluster)
    if origin and origin.cluster_digest not in (None, digest):
        made_for = f"{origin.cluster} (digest {origin.cluster_digest[:12]})"
        raise PlanError(
            f"the plan was made for the cluster {made_for}, and cluster {cluster.name} "
            f"(digest {digest[:12]}) is another; give the first one's file, or plan again"
        )
    gpus = rank_gpus(plan, len(cluster.ranks))
    if max(gpus) >= len(cluster.ranks) or not covers_gpus(plan, len(gpus)):
        raise PlanError(
            f"the plan is for {spell_ranks(plan)} on GPUs numbered up to {max(gpus)}, but cluster "
            f"{cluster.name} has {len(cluster.ranks)} GPUs; give the cluster file that it was made for"
        )
    return gpus


def _assign(
    nodes: Sequence[_Node], all_nodes: Sequence[_Node], slurm_nodes: SlurmNodes, hosts: Sequence[str]
) -> dict[str, str]:
    """Assign a host to each node: first the host of the same name, then nodes with fewest choices first."""
    host_of = {node.name: host for node in nodes if (host := node.named(hosts)) is not None}
    used = set(host_of.values())
    free_hosts = [host for host in hosts if host not in used]
    choices = [
        (node, _alike(node, all_nodes, slurm_nodes, free_hosts)) for node in nodes if node.name not in host_of
    ]
    for node, choice in sorted(choices, key=lambda pair: len(pair[1])):
        host = next((host for host in choice if host not in used), None)
        if host is None:
            raise PlatformError(
                f"the plan needs {_counted([node.name for node in nodes], 'node')}, but the job has "
                f"{_counted(hosts, 'host')}, and no host that is left matches {node.name}; "
                f"ask sbatch for {_wanted(node, slurm_nodes)}, or plan for what the job has"
            )
        host_of[node.name] = host
        used.add(host)
    return {node.name: host_of[node.name] for node in nodes}


def _find_spares(
    nodes: Sequence[_Node], host_of: Mapping[str, str], slurm_nodes: SlurmNodes, hosts: Sequence[str]
) -> dict[str, str]:
    """Return the host of each node without ranks, where the job has one that is this node without doubt."""
    spares: dict[str, str] = {}
    for node in nodes:
        free = [host for host in hosts if host not in {*host_of.values(), *spares.values()}]
        if node.name in host_of or not free:
            continue
        with contextlib.suppress(ClusterError, PlatformError):
            host = node.named(free) or next(iter(_alike(node, nodes, slurm_nodes, free)), None)
            if host is not None:
                _check_stand_ins(nodes, {**host_of, **spares, node.name: host}, slurm_nodes)
                spares[node.name] = host
    return spares


def _alike(node: _Node, nodes: Sequence[_Node], slurm_nodes: SlurmNodes, hosts: Sequence[str]) -> list[str]:
    """Return the hosts that may stand in for this node, those last that may be another of the nodes."""
    namesake = node.named(slurm_nodes)
    if namesake is not None:
        return [host for host in hosts if slurm_nodes[host] == slurm_nodes[namesake]]
    if node.host is not None:  # the file says which host it is: no other is taken for it by what it has
        raise ClusterError(
            f"the cluster file names the host {node.host} for {node.name}, which the job lacks and Slurm "
            f"does not know; what is left of the job: {_counted(hosts, 'host')}; correct hosts, or leave it "
            f"out to find nodes by the feature, partition or GPUs of {node.entry.name}"
        )
    kind, (gpu, gpus) = node.entry.name, node.hardware
    if node.is_called_so(slurm_nodes):
        return [host for host in hosts if slurm_nodes[host].is_called(kind)]
    if any(described.types_of(gpu, gpus) for described in slurm_nodes.values()):
        fitting = [host for host in hosts if slurm_nodes[host].types_of(gpu, gpus)]
        return sorted(fitting, key=lambda host: _rival(node, nodes, slurm_nodes[host]) is not None)
    called = sorted({name for host in slurm_nodes.values() for name in host.features | host.partitions})
    types = sorted({type_ for host in slurm_nodes.values() for type_ in gpus_of(host.gres)} - {""})
    raise ClusterError(
        f"the cluster file has a node {kind} with {gpus} {gpu}, and Slurm knows no host, feature or "
        f"partition {kind}, nor such GPUs (types in gres: {first_few(types) or 'none'}); name its hosts "
        f"(hosts: h[01-06]), or call it as a feature or partition ({first_few(called)})"
    )


def _wanted(node: _Node, slurm_nodes: SlurmNodes) -> str:
    host = node.named(slurm_nodes)
    if host is None and node.is_called_so(slurm_nodes):
        return f"one more with the feature, or in the partition, {node.entry.name}"
    if host is None:
        return f"one more with {node.entry.gpus} {node.entry.gpu} (--gpus-per-node=TYPE:{node.entry.gpus})"
    like = slurm_nodes[host]
    return (
        f"{host} (--nodelist), or one more like it (partitions {first_few(sorted(like.partitions))}; "
        f"features {first_few(sorted(like.features)) or 'none'}; gres {like.gres})"
    )


def _check_stand_ins(nodes: Sequence[_Node], host_of: Mapping[str, str], slurm_nodes: SlurmNodes) -> None:
    """Refuse to guess where Slurm describes nodes as equal that the cluster file says differ."""
    described: dict[SlurmNode, dict[tuple[str, int], _Node]] = {}
    for node in nodes:
        host = host_of.get(node.name) or node.named(slurm_nodes)
        if host is not None:
            described.setdefault(slurm_nodes[host], {}).setdefault(node.hardware, node)
    for node in nodes:
        host = host_of.get(node.name)
        if host is None or host in node.host_names:
            continue
        rival = None if node.is_called_so(slurm_nodes) else _rival(node, nodes, slurm_nodes[host])
        if rival is not None:
            raise PlatformError(
                f"Slurm's type of the GPUs of {host} (gres {slurm_nodes[host].gres}) may be the "
                f"{node.entry.gpu} of {node.name} or the {rival.entry.gpu} of {rival.name}; name each node's "
                "hosts in the cluster file (hosts: h[01-06])"
            )
        for (gpu, gpus), other_node in described[slurm_nodes[host]].items():
            if (gpu, gpus) != node.hardware:
                raise PlatformError(
                    f"Slurm describes {node.name} and {other_node.name} alike, the cluster file has "
                    f"{node.entry.gpus} {node.entry.gpu} on the one and {gpus} {gpu} on the other, so {host} "
                    "may be either; name each node's hosts in the file (hosts: h[01-06]), or let features "
                    "tell them apart"
                )


def _rival(node: _Node, nodes: Sequence[_Node], described: SlurmNode) -> _Node | None:
    """Return a node with other GPUs that a host's type of GPUs fits as well as this node's."""
    types = described.types_of(*node.hardware)
    others = (other for other in nodes if other.entry.gpu != node.entry.gpu)
    return next((other for other in others if types & described.types_of(*other.hardware)), None)


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'} ({first_few(names)})"


#: Megatron writes its name last into a folder of checkpoints, and goes on only where it is there.
TRACKER = "latest_checkpointed_iteration.txt"

#: What Megatron does at every start, so that a second one would undo the first; and what to give instead.
_EVERY_START = {
    "--finetune": "begins again at iteration 0 at every start; give --pretrained-checkpoint FOLDER instead, "
    "and no --load",
    "--ckpt-step": f"loads that step at every start; leave it out, and write the number into {TRACKER} of a "
    "copy of the folder",
}


@dataclass(frozen=True)
class TrainingStart:
    """Arguments and checkpoint folders with which a training run starts."""

    words: tuple[str, ...]
    save: str
    load: str


def plan_start(
    words: Sequence[str], path: Path, *, plan: str, checkpoints: str, save_interval: int, again: bool
) -> TrainingStart:
    """Complete the user's arguments with what a training run under Slurm needs.

    The user's --save, --load, --save-interval and --ckpt-format stand. Without --load, the run goes on
    from where it saves. With another --load, it begins there, and goes on from where it saves when Slurm
    starts the job again.

    Args:
        checkpoints: folder for checkpoints, if the user names none.
    """
    flags = {word.partition("=")[0] for word in words}
    for flag, why in _EVERY_START.items():
        if flag in flags:
            raise HexiError(f"{path}: {flag} {why}")
    own_plan = last_value(words, "--hexi-plan", path)
    if own_plan not in (None, plan):
        raise HexiError(
            f"{path}: --hexi-plan {own_plan}, and ranks are placed by {plan}; leave it out, and set "
            f"PLAN={own_plan} where the job is submitted"
        )
    save = last_value(words, "--save", path) or checkpoints
    own_load = last_value(words, "--load", path)
    load = own_load or save
    if Path(load) != Path(save) and (Path(save) / TRACKER).exists():
        if not again:
            raise HexiError(
                f"{path}: --load {load}, and {save}, where it saves, holds a checkpoint already; leave out "
                "--load to go on from that, or save to another folder"
            )
        load = save
    defaults = {
        "--hexi-plan": plan,
        "--save": save,
        "--load": load,
        "--save-interval": str(save_interval),
        "--ckpt-format": "torch_dist",
    }
    # Of a flag that is given twice, Megatron takes the last.
    added = [flag for flag in defaults if flag not in flags or (flag == "--load" and load != own_load)]
    return TrainingStart((*words, *(word for flag in added for word in (flag, defaults[flag]))), save, load)
