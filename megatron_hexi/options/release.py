"""The release of megatron-core whose options are assumed: the installed release, or the newest supported."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

#: Release series of megatron-core whose options are recorded, each from its last release, oldest first.
VERSIONS = ("0.17", "0.18", "0.19")


@functools.cache
def assumed_release() -> str:
    """Return the installed release of megatron-core, or else the newest supported release.

    A pre-release counts as its release.
    """
    try:
        return Version(version("megatron-core")).base_version
    except PackageNotFoundError:
        return VERSIONS[-1]


def is_assumed(versions: str) -> bool:
    """Whether the assumed release is one of the given versions (a PEP 440 specifier)."""
    return SpecifierSet(versions).contains(assumed_release())


def series(release: str) -> str:
    """Return the release series of a version: "0.19" for "0.19.2"."""
    return ".".join(release.split(".")[:2])


def assumed_series() -> str:
    """Return the release series of the assumed release, whose options are used."""
    installed = series(assumed_release())
    return installed if installed in VERSIONS else VERSIONS[-1]
