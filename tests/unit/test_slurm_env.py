"""SLURM's variables become torch.distributed's."""

from __future__ import annotations

import doctest

import pytest

from megatron_hexi.errors import PlatformError
from megatron_hexi.platform import slurm
from megatron_hexi.platform.slurm import adopt_slurm_environment, expand_hostlist

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "h[01-02],a100-1",
}


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(slurm).failed == 0


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


def test_a_step_without_torchrun() -> None:
    environment = dict(STEP)
    adopt_slurm_environment(environment)
    assert {name: environment[name] for name in environment.keys() - STEP.keys()} == {
        "RANK": "5",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h01",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }


def test_the_hosts_of_the_step_come_before_those_of_the_job() -> None:
    environment = STEP | {"SLURM_STEP_NODELIST": "a100-1"}
    adopt_slurm_environment(environment)
    assert environment["MASTER_ADDR"] == "a100-1"


def test_a_heterogeneous_job_meets_on_the_first_host_of_component_0() -> None:
    """All components derive the same address and port, whatever their own lists and job ids are."""
    ends = []
    for own_nodes, own_job in (("h100-1", "70"), ("a100-[1-2]", "71")):
        environment = STEP | {
            "SLURM_STEP_NODELIST": own_nodes,
            "SLURM_JOB_ID": own_job,
            "SLURM_HET_JOB_ID": "70",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "h100-1",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "a100-[1-2]",
        }
        adopt_slurm_environment(environment)
        ends.append((environment["MASTER_ADDR"], environment["MASTER_PORT"]))
    assert ends == [("h100-1", "20070")] * 2


def test_what_the_user_set_stays() -> None:
    environment = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    del environment["SLURM_JOB_NODELIST"]
    adopt_slurm_environment(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_torchrun_inside_slurm_is_left_alone() -> None:
    environment = STEP | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    before = dict(environment)
    adopt_slurm_environment(environment)
    assert environment == before


def test_outside_slurm_nothing_happens() -> None:
    environment = {"PATH": "/bin"}
    adopt_slurm_environment(environment)
    assert environment == {"PATH": "/bin"}


def test_a_step_that_names_no_host_is_refused() -> None:
    environment = dict(STEP)
    del environment["SLURM_JOB_NODELIST"]
    with pytest.raises(PlatformError, match="set MASTER_ADDR"):
        adopt_slurm_environment(environment)
