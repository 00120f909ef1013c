"""The catalogue of known GPUs: memory, links and achieved rates, with sources, from data/devices.yaml."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter

from megatron_hexi.cluster.device import Device
from megatron_hexi.cluster.entries import Builder, DeviceEntry, Mask, Pass
from megatron_hexi.cluster.schema import Name, Share, Size, Text
from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import YamlFile, read_yaml
from megatron_hexi.yaml_schema import Strict, parse_file

DATA = Path(__file__).parent / "data" / "devices.yaml"


@dataclass(frozen=True)
class CatalogFile(Strict):
    """The format of the catalogue's file, data/devices.yaml."""

    sources: dict[Name, Text]
    layer_share: Share
    call_us: Size
    attention_half: dict[Mask, dict[Pass, Size]]
    devices: dict[Name, DeviceEntry]


def catalog() -> Mapping[str, Device]:
    """Return all devices of the catalogue by name, in the order of data/devices.yaml."""
    return _load()[1]


def device(name: str) -> Device:
    """Return the device of the catalogue with a given name.

    Raises:
        ClusterError: the catalogue has no such device; the message suggests similar names.
    """
    devices = catalog()
    if name not in devices:
        raise ClusterError(f"GPU {unknown_device(name, devices)}")
    return devices[name]


def unknown_device(name: str, known: Iterable[str]) -> str:
    """Return the error text about an unknown device name, with similar names or the place of the list."""
    names = {item.lower(): item for item in known}
    families = {key.split("-")[0] for key in names}
    lowered = name.lower()
    similar = [item for key, item in names.items() if lowered and key.startswith(lowered)]
    if not similar:
        close = difflib.get_close_matches(lowered, [*names, *families], n=3, cutoff=0.6)
        similar = [item for key, item in names.items() if key in close or key.split("-")[0] in close][:4]
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`hexi catalog` lists those that are"
    return f"{name!r} is not in the catalogue; {hint}"


def catalog_with(entries: Mapping[str, DeviceEntry], source: YamlFile) -> Mapping[str, Device]:
    """Return the catalogue, extended and overridden by the devices and measured curves of a cluster file."""
    file, devices = _load()
    builder = Builder(source, devices, file.attention_half, {}, 1.0, False, 0.0)
    return {**devices, **{name: builder.device(name, entry) for name, entry in entries.items()}}


@functools.cache
def _load() -> tuple[CatalogFile, Mapping[str, Device]]:
    source = read_yaml(DATA)
    shape = "a catalogue is a mapping with sources and devices"
    file = parse_file(TypeAdapter(CatalogFile), source, shape, ClusterError)
    devices: dict[str, Device] = {}
    builder = Builder(
        source, devices, file.attention_half, file.sources, file.layer_share, True, file.call_us
    )
    for name, entry in file.devices.items():  # in order: an entry may be like an earlier one
        devices[name] = builder.device(name, entry)
    return file, MappingProxyType(devices)
