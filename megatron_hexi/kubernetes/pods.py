"""The pods of a job, one for each node, and the commands of each.

Pods of one kind differ in their index only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.grouping import grouped
from megatron_hexi.kubernetes.settings import FOLDER, MAX_NAME, Settings
from megatron_hexi.kubernetes.start import Command
from megatron_hexi.plan import Plan
from megatron_hexi.report.launch_lines import find_agents
from megatron_hexi.slurm import find_gpus

_PORT = 29500
_STORE_PORT = 29400
#: The kind of the pod that keeps an elastic job's store.
STORE = "store"


@dataclass(frozen=True)
class PodKind:
    """Pods that differ in their index only.

    Args:
        entry: entry of the cluster file that describes the nodes; ``None``: the pods need no GPU.
        hosts: host names of these nodes, as far as the cluster file gives them.
    """

    name: str
    entry: str | None
    gpu: str
    gpus: int
    nodes: tuple[int, ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pods:
    """A job's pods.

    Args:
        kinds: the kinds of pods, in the order of their first nodes; an elastic job's store comes last.
        commands: the processes of each pod, by name of its kind and by index.
    """

    kinds: tuple[PodKind, ...]
    commands: dict[str, list[list[Command]]]

    def table(self) -> dict[str, list[list[dict[str, Any]]]]:
        """Return the commands of all pods as `start` reads them."""
        return {kind: [list(map(asdict, pod)) for pod in pods] for kind, pods in self.commands.items()}


def training_pods(plan: Plan, cluster: Cluster, settings: Settings) -> Pods:
    """Return the pods of a training run in which rank r runs on the plan's GPU of rank r.

    A pod starts torchrun once for each run of consecutive ranks on its node (`find_agents`).
    """
    agents = find_agents(plan, cluster)
    ranks = [cluster.ranks[gpu] for gpu in find_gpus(plan, cluster)]
    node_of = [ranks[agent.first_rank].node for agent in agents]
    used: dict[int, list[int]] = {}
    for node, agent in zip(node_of, agents, strict=True):
        used.setdefault(node, []).extend(agent.gpus)
    kinds = _kinds(cluster, {node: len(gpus) for node, gpus in used.items()}, settings)
    main = _addresses(kinds, settings)[node_of[0]]
    commands: dict[int, list[Command]] = {node: [] for node in used}
    for number, (node, agent) in enumerate(zip(node_of, agents, strict=True)):
        inside = sorted(used[node])
        gpus = [inside.index(gpu) for gpu in agent.gpus]
        words = _torchrun(len(gpus), len(agents), number, main)
        seen = {} if len(gpus) == len(inside) else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        commands[node].append(Command((*words, "-m", "megatron_hexi.pretrain_gpt"), True, seen))
    return Pods(kinds, {kind.name: [commands[node] for node in kind.nodes] for kind in kinds})


def elastic_pods(plan: Plan, cluster: Cluster, settings: Settings) -> Pods:
    """Return the pods of a job that goes on without lost nodes, and the pod that keeps its store."""
    used = Counter(cluster.ranks[gpu].node for gpu in find_gpus(plan, cluster))
    for node, count in used.items():
        of_node = len(cluster.nodes[node].ranks)
        if count < of_node:
            raise HexiError(
                f"--elastic: the plan has ranks on {count} of the {of_node} GPUs of "
                f"{cluster.nodes[node].name}, and an elastic job uses whole nodes; leave --elastic out, or "
                "plan for whole nodes"
            )
    if settings.least is None or not 0 < settings.least <= len(used):
        raise HexiError(f"--elastic {settings.least}: the plan has {len(used)} nodes; give 1 to {len(used)}")
    store = PodKind(STORE, None, "", 0, (-1,))
    spares = _spares(cluster, used, settings)
    kinds = _kinds(cluster, used | spares, settings, (store,))
    addresses = _addresses((*kinds, store), settings)
    place = ("--rdzv-endpoint", f"{addresses[-1]}:{_STORE_PORT}")
    keep = Command(("-m", "megatron_hexi.elastic", "--keep-store", *place))
    agent = ("-m", "megatron_hexi.elastic", "--nnodes", f"{settings.least}:{len(used)}")
    meeting = (*place, "--rdzv-id", settings.name)

    def command(node: int, gpus: int) -> Command:
        own = ("--node", cluster.nodes[node].name, "--local-addr", addresses[node])
        waiting = ("--spare",) if node in spares else ()
        words = (*agent, "--nproc-per-node", str(gpus), *meeting, *own, *waiting, "--")
        return Command((*words, "--hexi-cluster", str(FOLDER / "cluster.yaml")), True)

    commands = {kind.name: [[command(node, kind.gpus)] for node in kind.nodes] for kind in kinds}
    return Pods((*kinds, store), {**commands, STORE: [[keep]]})


def _spares(cluster: Cluster, used: Mapping[int, int], settings: Settings) -> dict[int, int]:
    """Return the number of GPUs of each spare node, by number of the node."""
    spares: dict[int, int] = {}
    for name in settings.spares:
        numbers = cluster.file.find_nodes(name)
        if not numbers or any(number in used for number in numbers):
            free = [node.name for number, node in enumerate(cluster.nodes) if number not in used]
            raise HexiError(
                f"--spare {name}: the plan uses this node, or the cluster file lacks it; "
                + (f"give one of {', '.join(free)}" if free else "the plan uses all nodes: leave --spare out")
            )
        spares |= {number: len(cluster.nodes[number].ranks) for number in numbers}
    return spares


def probe_pods(cluster: Cluster, settings: Settings, words: Sequence[str]) -> Pods:
    """Return the pods that measure all nodes of a cluster file, with ranks in the file's order."""
    used = {number: len(node.ranks) for number, node in enumerate(cluster.nodes)}
    kinds = _kinds(cluster, used, settings)
    main = _addresses(kinds, settings)[0]
    probe = ("-m", "megatron_hexi.cli.main", "probe", *words)

    def command(node: int) -> Command:
        return Command((*_torchrun(used[node], len(used), node, main), *probe))

    return Pods(kinds, {kind.name: [[command(node)] for node in kind.nodes] for kind in kinds})


def _torchrun(ranks: int, agents: int, number: int, main: str) -> tuple[str, ...]:
    """Return the words that start torchrun with a fixed node rank, so that ranks are numbered as planned."""
    return (
        *("-m", "megatron_hexi.torchrun"),
        *(f"--nproc-per-node={ranks}", f"--nnodes={agents}", f"--node-rank={number}"),
        *(f"--master-addr={main}", f"--master-port={_PORT}"),
    )


def _kinds(
    cluster: Cluster, used: Mapping[int, int], settings: Settings, others: Sequence[PodKind] = ()
) -> tuple[PodKind, ...]:
    """Return the kinds of pods: one for all nodes of an entry of which equally many GPUs are used."""
    entries = [entry for entry in cluster.file.nodes for _ in range(entry.count)]
    alike = grouped(((entries[node].name, used[node]), node) for node in sorted(used))
    kinds_of = Counter(entry for entry, _ in alike)
    kinds: list[PodKind] = []
    for (entry, gpus), nodes in alike.items():
        name = _label(f"{entry}-{gpus}" if kinds_of[entry] > 1 else entry)
        while name in (kind.name for kind in (*others, *kinds)):
            name = f"{name}-x"
        named = tuple(host for node in nodes if (host := cluster.file.hosts[node]) is not None)
        kinds.append(PodKind(name, entry, entries[nodes[0]].gpu, gpus, tuple(nodes), named))
    for kind in (*others, *kinds):
        longest = _host(kind, len(kind.nodes) - 1, settings)
        if len(longest) > MAX_NAME:
            raise HexiError(
                f"--name {settings.name}: a pod would be called {longest}, {len(longest)} characters, and "
                f"Kubernetes takes {MAX_NAME}; give a shorter --name, or shorter names in the cluster file"
            )
    return tuple(kinds)


def _label(name: str) -> str:
    """Return a name of the cluster file as a DNS label.

    >>> _label("H100_rack.2")
    'h100-rack-2'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _host(kind: PodKind, index: int, settings: Settings) -> str:
    """Return the host name that Kubernetes gives a pod: job and index, in a JobSet also the job's replica."""
    replica = "-0" if settings.form == "jobset" else ""
    return f"{settings.name}-{kind.name}{replica}-{index}"


def _addresses(kinds: Sequence[PodKind], settings: Settings) -> dict[int, str]:
    """Return the address at which other pods reach each node's pod, by number of the node.

    The DNS domain of the addresses is the job's Service.
    """
    return {
        node: f"{_host(kind, index, settings)}.{settings.name}"
        for kind in kinds
        for index, node in enumerate(kind.nodes)
    }
