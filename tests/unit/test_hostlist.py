"""Slurm's host lists."""

from __future__ import annotations

import doctest

import pytest

from megatron_hexi import hostlist as hostlist_module
from megatron_hexi.errors import PlatformError
from megatron_hexi.hostlist import expand_hostlist


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(hostlist_module).failed == 0


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("", []),
        ("node7", ["node7"]),
        ("a,b", ["a", "b"]),
        ("a[1-3,05],b", ["a1", "a2", "a3", "a05", "b"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("rack[1-2]-n[1,3]x", ["rack1-n1x", "rack1-n3x", "rack2-n1x", "rack2-n3x"]),
        ("host.example.org", ["host.example.org"]),
    ],
)
def test_host_lists(hostlist: str, hosts: list[str]) -> None:
    assert expand_hostlist(hostlist) == hosts


@pytest.mark.parametrize("hostlist", ["a[1-3", "a]1", "a[x]", "a[3-1]", "a[[1]]", "a[]"])
def test_broken_host_lists_are_refused(hostlist: str) -> None:
    with pytest.raises(PlatformError, match="host list"):
        expand_hostlist(hostlist)
