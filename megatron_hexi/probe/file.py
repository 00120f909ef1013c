"""Writes the cluster file, after it was read and checked as its users will read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_hexi.cluster import Cluster, cluster_from_yaml
from megatron_hexi.probe.document import Measurement
from megatron_hexi.probe.network import shared_note
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import yaml_from_text


def write_cluster(
    path: Path, data: dict[str, Any], notes: list[str], measured: Measurement
) -> tuple[Cluster, list[str]]:
    """Write the file whole or not at all.

    Returns:
        The cluster as the planner reads it, and all notes.

    Raises:
        HexiError: it cannot be written.
        ClusterError: a measured value is beyond what a cluster file may say.
    """
    text = yaml.dump(data, Dumper=_ClusterDumper, sort_keys=False, width=110, allow_unicode=True)
    cluster = cluster_from_yaml(yaml_from_text(path, text))
    shared = shared_note(measured, cluster)
    comments = [*notes, shared] if shared else notes
    head = [f"measured by hexi probe, {measured.started}", *comments]
    write_text_atomically(path, "".join(f"# {line}\n" for line in head) + text)
    return cluster, comments


class _ClusterDumper(yaml.SafeDumper):
    """Dumps blocks at the top, and flow style for a node, a link, a curve and lists: as people write them."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = "points" in mapping or not any(
            isinstance(value, dict) and key not in ("intra", "host") for key, value in mapping.items()
        )
        return super().represent_mapping(tag, mapping, flow_style=flow)

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        flow = not any(isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        return True
