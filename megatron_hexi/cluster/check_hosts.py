"""Check the host names that a cluster file gives for its nodes, and count them."""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.cluster.model import ClusterFile
from megatron_hexi.cluster.schema import refuse
from megatron_hexi.errors import PlatformError
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import short


def with_counted_hosts(file: ClusterFile, source: YamlFile) -> ClusterFile:
    """Return the cluster file with `count` set to the number of hosts in each entry that names hosts.

    Raises:
        ClusterError: a host list is malformed, names a host twice, or contradicts a given `count`.
    """
    entries = list(file.nodes)
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if entry.hosts is None:
            continue
        place: Place = ("nodes", number, "hosts")
        value = f"= {short(entry.hosts)}"
        try:
            hosts = expand_hostlist(entry.hosts)
        except PlatformError:
            refuse(
                source, place, f"{value} is no list of hosts", "write it as Slurm does: h[01-06], or h01,h02"
            )
        for host in hosts:
            if host in seen:
                problem = f"{value} names {host} again, which nodes[{seen[host]}] has"
                refuse(source, place, problem, "name each host once")
            seen[host] = number
        if entry.count not in (1, len(hosts)):
            problem = f"{value} names {len(hosts)} hosts for count: {entry.count}"
            refuse(source, place, problem, "leave count out, or correct one of them")
        entries[number] = replace(entry, count=len(hosts))
    return replace(file, nodes=tuple(entries))
