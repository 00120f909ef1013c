"""Derives torch.distributed's variables from SLURM's under ``srun``, which has no torchrun."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron_hexi.errors import HexiError, PlatformError
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.text_file import read_text
from megatron_hexi.whole_number import variable_number

#: Names the file of `hexi place`: the host of each rank, a line each, in rank order.
HOSTS_VARIABLE = "HEXI_HOSTS"

#: Ports below those that Linux hands out to whoever asks for any (`ip_local_port_range`, from 32768).
_PORT_BASE = 20000
_PORT_COUNT = 12000
_MOST_PORT, _MOST_RANKS = 2**16 - 1, 2**24


def adopt_slurm_environment(environment: MutableMapping[str, str]) -> None:
    """Set torch.distributed's variables from SLURM's, where a launcher has not set them.

    Does nothing under torchrun (``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are there) and outside a
    SLURM step (``SLURM_PROCID`` and its fellows are not). Variables that are set stay. In a heterogeneous
    job ``SLURM_PROCID`` and ``SLURM_NTASKS`` count across the components of the step, and rank 0 is taken to
    be on the first host of component 0; a step of later components alone has to set ``MASTER_ADDR`` itself.

    SLURM can only number tasks component by component. Where ``HEXI_HOSTS`` names a file, the n-th task on a
    host is instead the n-th rank that the file puts there.
    """
    launched = all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    in_step = all(
        name in environment for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_GTIDS")
    )
    if in_step and not launched:
        for name, value in _derived(environment).items():
            environment.setdefault(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        variable_number(environment, name, 0, most=_MOST_PORT if name == "MASTER_PORT" else _MOST_RANKS)


def _derived(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch.distributed's variables by those of a task of SLURM's."""
    has_parts = "SLURM_HET_JOB_ID" in environment
    job = variable_number(environment, "SLURM_HET_JOB_ID" if has_parts else "SLURM_JOB_ID", 0)
    derived = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(len(environment["SLURM_GTIDS"].split(","))),  # the ranks on this node
        "MASTER_PORT": str(_PORT_BASE + job % _PORT_COUNT),
    }
    if HOSTS_VARIABLE in environment:
        derived |= _placed(environment, Path(environment[HOSTS_VARIABLE]))
    elif "MASTER_ADDR" not in environment:
        derived["MASTER_ADDR"] = _first_host(environment)
    return derived


def _placed(environment: Mapping[str, str], path: Path) -> dict[str, str]:
    """Return the rank that the file of hosts gives to this task, and the host of rank 0."""
    remedy = "write it with hexi place, to a folder that every node sees"
    try:
        hosts = read_text(path, remedy=remedy, content_remedy=remedy).split()
    except HexiError as problem:
        raise PlatformError(f"{HOSTS_VARIABLE}={problem}") from None
    node = environment.get("SLURMD_NODENAME", "")
    tasks = len(environment["SLURM_GTIDS"].split(","))
    ranks = [rank for rank, host in enumerate(hosts) if host == node]
    if (len(ranks), len(hosts)) != (tasks, variable_number(environment, "SLURM_NTASKS")):
        raise PlatformError(
            f"{HOSTS_VARIABLE}={path}: {len(ranks)} of its {len(hosts)} ranks are on {node}, SLURM started "
            f"{tasks} of {environment['SLURM_NTASKS']} tasks there; start the step as "
            "scripts/slurm/train.sbatch does"
        )
    return {
        "RANK": str(ranks[variable_number(environment, "SLURM_LOCALID", most=tasks - 1)]),
        "MASTER_ADDR": hosts[0],
    }


def _first_host(environment: Mapping[str, str]) -> str:
    # A step may run on some hosts of its job only, so its own list comes before the job's.
    names = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    for name in names:
        hosts = expand_hostlist(environment.get(name, ""))
        if hosts:
            return hosts[0]
    raise PlatformError(
        f"none of {', '.join(names)} names a host; start with srun inside an allocation, or set MASTER_ADDR"
    )
