"""SLURM's variables become torch.distributed's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import PlatformError
from megatron_hexi.platform.slurm import adopt_slurm_environment
from tests.support.plans import examples

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "h[01-02],a100-1",
}


def test_a_step_without_torchrun() -> None:
    environment = dict(STEP)
    adopt_slurm_environment(environment)
    assert {name: environment[name] for name in environment.keys() - STEP.keys()} == {
        "RANK": "5",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h01",
        "MASTER_PORT": str(20000 + 123456 % 12000),
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


def _tasks(hosts: list[str], components: list[list[str]]) -> list[dict[str, str]]:
    """The environments of a step with a task for each host: Slurm counts them component by component."""
    tasks: list[dict[str, str]] = []
    for component in components:
        mine = [host for host in hosts if host in component]
        ids = {host: [len(tasks) + n for n, other in enumerate(mine) if other == host] for host in mine}
        first = len(tasks)
        for number, host in enumerate(mine, start=first):
            tasks.append(
                STEP
                | {
                    "SLURM_PROCID": str(number),
                    "SLURM_NTASKS": str(len(hosts)),
                    "SLURM_LOCALID": str(ids[host].index(number)),
                    "SLURM_GTIDS": ",".join(map(str, ids[host])),
                    "SLURMD_NODENAME": host,
                }
            )
    return tasks


@examples(100)
@given(hosts=st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=12), data=st.data())
def test_ranks_are_where_the_file_of_hosts_puts_them(tmp_path_factory, hosts, data) -> None:
    """Whatever components the hosts are in, and in which order Slurm has these."""
    order = data.draw(st.permutations(["a", "b", "c", "d"]))
    cut = data.draw(st.integers(0, 4))
    path: Path = tmp_path_factory.getbasetemp() / "hosts"
    path.write_text("\n".join(hosts))
    ranks = {}
    for task in _tasks(hosts, [list(order[:cut]), list(order[cut:])]):
        adopt_slurm_environment(environment := task | {"HEXI_HOSTS": str(path)})
        assert environment["MASTER_ADDR"] == hosts[0]
        assert environment["WORLD_SIZE"] == str(len(hosts))
        assert int(environment["LOCAL_WORLD_SIZE"]) == hosts.count(task["SLURMD_NODENAME"])
        ranks[int(environment["RANK"])] = (task["SLURMD_NODENAME"], int(environment["LOCAL_RANK"]))
    assert {rank: host for rank, (host, _) in ranks.items()} == dict(enumerate(hosts))
    for host in set(hosts):  # of a host's ranks, a higher one has a GPU of a higher number
        gpus = [gpu for _, (where, gpu) in sorted(ranks.items()) if where == host]
        assert gpus == list(range(hosts.count(host)))


@pytest.mark.parametrize("hosts", ["", "a\nb\n", "a\na\na\n", "b\nb\n"])
def test_a_step_that_is_not_as_the_file_of_hosts_is_refused(tmp_path, hosts) -> None:
    path = tmp_path / "hosts"
    path.write_text(hosts)
    (task, _) = _tasks(["a", "a"], [["a"]])
    with pytest.raises(PlatformError, match=r"of its \d ranks are on a, SLURM started 2 of 2 tasks there"):
        adopt_slurm_environment(task | {"HEXI_HOSTS": str(path)})


def test_a_file_of_hosts_that_is_not_there_is_refused(tmp_path) -> None:
    (task,) = _tasks(["a"], [["a"]])
    with pytest.raises(PlatformError, match="a folder that every node sees"):
        adopt_slurm_environment(task | {"HEXI_HOSTS": str(tmp_path / "hosts")})
