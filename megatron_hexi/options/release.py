"""The release of megatron-core whose options are read: the installed one, or else the newest supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

#: The release series whose options are recorded, each from its last release, oldest first.
VERSIONS = ("0.17", "0.18", "0.19")


def assumed_release() -> str:
    """Return the installed version of megatron-core (of a pre-release, the release); else the newest."""
    try:
        return Version(version("megatron-core")).base_version
    except PackageNotFoundError:
        return VERSIONS[-1]


def is_assumed(versions: str) -> bool:
    """Whether the release is one of these versions (PEP 440)."""
    return SpecifierSet(versions).contains(assumed_release())


def series(release: str) -> str:
    """Return the release series of a version: "0.19" for "0.19.2"."""
    return ".".join(release.split(".")[:2])


def assumed_series() -> str:
    """Return the series whose options are read here."""
    installed = series(assumed_release())
    return installed if installed in VERSIONS else VERSIONS[-1]
