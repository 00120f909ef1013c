"""The user's choices for a job on Kubernetes, checked against its rules for names before anything is written.

The rules: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and …/labels/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, get_args

from megatron_hexi.errors import HexiError

#: Indexed Jobs and a Service of Kubernetes itself, or one JobSet (https://jobset.sigs.k8s.io).
Form = Literal["job", "jobset"]

#: Where pods find plan, arguments and commands.
FOLDER = PurePosixPath("/etc/hexi")
SHARED_MEMORY = PurePosixPath("/dev/shm")

MAX_NAME = 63
_MAX_SUBDOMAIN = 253
_MAX_KEY = _MAX_SUBDOMAIN + 1 + MAX_NAME
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SERVICE = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_CLAIM = re.compile(_SUBDOMAIN)
_QUALIFIED = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:{_SUBDOMAIN}/)?{_QUALIFIED}")
_VALUE = re.compile(rf"(?:{_QUALIFIED})?")
_DEVICE = re.compile(rf"{_SUBDOMAIN}/{_QUALIFIED}")
_NATIVE = ("cpu", "memory", "ephemeral-storage")
_QUANTITY = re.compile(r"[1-9][0-9]*(?:m|[kMGTP]|[KMGTP]i)?")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
#: https://github.com/distribution/reference: registry and its port, path, tag, digest.
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9](?:[-.A-Za-z0-9]*[A-Za-z0-9])?(?::[0-9]+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


@dataclass(frozen=True)
class Volume:
    """A folder that is mounted in every pod.

    Args:
        source: a PersistentVolumeClaim's name, or an absolute path on the node.
    """

    source: str
    path: PurePosixPath
    read_only: bool

    @property
    def is_claim(self) -> bool:
        """Whether the source is a claim, not a folder of the node."""
        return not self.source.startswith("/")


@dataclass(frozen=True)
class Settings:
    """The user's choices for a job on Kubernetes that stand in no plan and in no cluster file.

    Args:
        labels: labels of the nodes of an entry of the cluster file, by entry; they replace the GPU's product
            label.
        resources: resources that each pod asks for besides its GPUs, by entry of the cluster file; those
            under ``""`` are for all entries.
        least: smallest number of nodes with which an elastic job goes on; ``None``: the job is not elastic.
    """

    form: Form
    image: str
    name: str
    namespace: str | None = None
    volumes: tuple[Volume, ...] = ()
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    restarts: int = 3
    least: int | None = None
    spares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise HexiError(f"--kubernetes {self.form}: not known; give {' or '.join(get_args(Form))}")
        if not _IMAGE.fullmatch(self.image) or len(self.image) > 255:
            remedy = "give one as registry.example/hexi:0.1.0"
            raise HexiError(f"--image {self.image}: not an image's name; {remedy}")
        if not _SERVICE.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise HexiError(
                f"--name {self.name}: give at most {MAX_NAME} lower-case letters, digits and dashes that "
                "begin with a letter and end in no dash"
            )
        space = self.namespace
        if space is not None and (not re.fullmatch(_LABEL, space) or len(space) > MAX_NAME):
            raise HexiError(
                f"--namespace {space}: give at most {MAX_NAME} lower-case letters, digits and dashes that "
                "neither begin nor end in a dash"
            )
        taken = {FOLDER: "the plan is mounted there", SHARED_MEMORY: "shared memory is mounted there"}
        for volume in self.volumes:
            if volume.path in taken:
                given = f"--volume {volume.source}:{volume.path}"
                raise HexiError(f"{given}: {taken[volume.path]}; choose another /PATH")
            taken[volume.path] = "another --volume is mounted there"

    def resources_of(self, entry: str) -> Mapping[str, str]:
        """Return the resources of an entry's pods besides GPUs; those of the entry replace those of all."""
        return {**self.resources.get("", {}), **self.resources.get(entry, {})}

    def holds(self, path: str) -> bool:
        """Whether a path in a pod lies in a volume; one with ``..`` may lead out of it."""
        whole = PurePosixPath(path)
        return ".." not in whole.parts and any(whole.is_relative_to(volume.path) for volume in self.volumes)


def read_volume(text: str) -> Volume:
    """Return the volume that ``CLAIM:/PATH`` or ``/FOLDER:/PATH`` names.

    An ending ``:ro`` makes it read-only.
    """
    source, *rest = text.split(":")
    read_only = rest[1:] == ["ro"]
    if len(rest) != 1 + read_only or not _is_folder(rest[0]):
        raise HexiError(f"--volume {text}: give CLAIM:/PATH or /FOLDER:/PATH, with :ro to read only")
    if source.startswith("/"):
        if not _is_folder(source):
            raise HexiError(f"--volume {text}: {source}: give a folder of the nodes below /, without ..")
    elif not _CLAIM.fullmatch(source) or len(source) > _MAX_SUBDOMAIN:
        raise HexiError(f"--volume {text}: {source!r} cannot name a PersistentVolumeClaim; give CLAIM:/PATH")
    return Volume(source, PurePosixPath(rest[0]), read_only)


def _is_folder(text: str) -> bool:
    path = PurePosixPath(text)
    return path.is_absolute() and path != PurePosixPath("/") and ".." not in path.parts and text.isprintable()


def read_labels(texts: Sequence[str], entries: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the node labels that texts ``ENTRY:LABEL=VALUE`` name, by entry."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        entry, _, label = text.partition(":")
        key, equals, value = label.partition("=")
        if not equals or not _KEY.fullmatch(key) or len(key) > _MAX_KEY or not _VALUE.fullmatch(value):
            raise HexiError(f"--node-label {text}: give ENTRY:LABEL=VALUE, such as h100:pool=fast")
        _check_entry("--node-label", text, entry, entries)
        if key in found.setdefault(entry, {}):
            raise HexiError(f"--node-label {text}: {key} of {entry} is given twice; keep one of them")
        found[entry][key] = value
    return found


def read_resources(texts: Sequence[str], entries: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the resources that texts ``[ENTRY:]NAME=COUNT`` name, by entry; without one under ``""``."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        place, equals, count = text.partition("=")
        entry, colon, name = place.rpartition(":")
        well = _QUANTITY if name in _NATIVE else _COUNT
        known = name in _NATIVE or (_DEVICE.fullmatch(name) and len(name) <= _MAX_KEY)
        if not equals or not known or not well.fullmatch(count):
            example = "rdma/hca_shared_devices_a=1 or memory=1Ti"
            raise HexiError(f"--resource {text}: give [ENTRY:]NAME=COUNT, such as {example}")
        if name == "nvidia.com/gpu":
            raise HexiError(f"--resource {text}: the plan says how many GPUs a pod has; leave it out")
        if colon:
            _check_entry("--resource", text, entry, entries)
        if name in found.setdefault(entry, {}):
            raise HexiError(f"--resource {text}: {name} is given twice; keep one of them")
        found[entry][name] = count
    return found


def check_host_names(entry: str, hosts: Sequence[str]) -> None:
    """Refuse hosts of the cluster file that cannot be nodes of Kubernetes."""
    for host in hosts:
        if not _VALUE.fullmatch(host):
            raise HexiError(
                f"nodes {entry}: the host {host[:80]} cannot be a node's name in Kubernetes; correct "
                f"hosts: in the cluster file, or give --node-label {entry}:LABEL=VALUE"
            )


def _check_entry(option: str, text: str, entry: str, entries: Sequence[str]) -> None:
    if entry not in entries:
        known = ", ".join(entries)
        raise HexiError(f"{option} {text}: the cluster file has no nodes {entry!r}; it has {known}")
