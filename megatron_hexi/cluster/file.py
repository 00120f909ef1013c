"""Read, check and digest cluster files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

from pydantic import TypeAdapter

from megatron_hexi.cluster.catalog import catalog_with
from megatron_hexi.cluster.check import check_cluster, check_size, with_counted_hosts
from megatron_hexi.cluster.model import ClusterFile
from megatron_hexi.cluster.topology import Cluster, build_cluster
from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import YamlFile, read_yaml
from megatron_hexi.yaml_schema import parse_file

_ADAPTER = TypeAdapter(ClusterFile)


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file, check all its rules and return the cluster.

    Raises:
        HexiError: the file cannot be read or is not YAML.
        ClusterError: a field or a rule is broken; one line with file, line, place, value and remedy.
    """
    return cluster_from_yaml(read_yaml(path))


def cluster_from_yaml(source: YamlFile) -> Cluster:
    """Return the cluster in a YAML document. Raises as `read_cluster` does."""
    if isinstance(source.data, dict) and "workload" in source.data and "nodes" not in source.data:
        raise ClusterError(f"{source.path}: is a plan; give the cluster file")
    shape = "a cluster file is a mapping with name, nodes and network"
    file = parse_file(_ADAPTER, source, shape, ClusterError)
    file = with_counted_hosts(file, source)
    check_size(file, source)
    devices = catalog_with(file.devices, source)
    check_cluster(file, devices, source)
    return build_cluster(file, devices)


def cluster_digest(cluster: Cluster) -> str:
    """Return the SHA-256 (hex) of a cluster file's nodes, links and devices, with defaults filled in.

    The digest ignores the file's `name`, `hosts` and `planner`. It also ignores the catalogue's figures, and
    fields that a later version adds and the file leaves out: so a later version with better curves gives the
    cluster of an old plan the same digest.
    """
    data = dataclasses.asdict(cluster.file)
    del data["name"], data["planner"]
    if not data["fabrics"]:
        del data["fabrics"]
    for node in data["nodes"]:
        del node["hosts"]
        if node["network"] is None:
            del node["network"]
    for name in ("matmul_blockwise", "matmul_mxfp8"):
        for device in data["devices"].values():
            if device[name] is None:
                del device[name]
    for link in (data["network"], *data["levels"]):
        if link is not None and link["gbit_s"] is None:
            del link["gbit_s"]
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
