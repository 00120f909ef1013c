"""Under SLURM's ``srun`` there is no torchrun: its variables are derived from SLURM's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, MutableMapping

from megatron_hexi.errors import PlatformError

_PORT_BASE = 20000
_PORT_COUNT = 20000


def adopt_slurm_environment(environment: MutableMapping[str, str]) -> None:
    """Set torch.distributed's variables from SLURM's, where a launcher has not set them.

    Does nothing under torchrun (``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are there) and outside a
    SLURM step (``SLURM_PROCID`` and its fellows are not). Variables that are set stay. In a heterogeneous
    job ``SLURM_PROCID`` and ``SLURM_NTASKS`` count across the components of the step, and rank 0 is taken to
    be on the first host of component 0; a step of later components alone has to set ``MASTER_ADDR`` itself.

    Args:
        environment: usually `os.environ`; changed in place.

    Raises:
        PlatformError: SLURM's variables name no host.
    """
    launched = all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    in_step = all(
        name in environment for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_GTIDS")
    )
    if launched or not in_step:
        return
    job = int(environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID", "0"))
    derived = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(len(environment["SLURM_GTIDS"].split(","))),  # the ranks on this node
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment),
        "MASTER_PORT": str(_PORT_BASE + job % _PORT_COUNT),
    }
    for name, value in derived.items():
        environment.setdefault(name, value)


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts that a SLURM host list names, in its order.

    >>> expand_hostlist("a[1-3,05],b")
    ['a1', 'a2', 'a3', 'a05', 'b']
    >>> expand_hostlist("r[1-2]n[08-10]")
    ['r1n08', 'r1n09', 'r1n10', 'r2n08', 'r2n09', 'r2n10']

    Raises:
        PlatformError: the brackets do not match, or a range is none.
    """
    return [host for entry in _split(hostlist) for host in _expand(entry)]


def _first_host(environment: MutableMapping[str, str]) -> str:
    # A step may run on some hosts of its job only, so its own list comes before the job's.
    names = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    for name in names:
        hosts = expand_hostlist(environment.get(name, ""))
        if hosts:
            return hosts[0]
    raise PlatformError(
        f"none of {', '.join(names)} names a host; start with srun inside an allocation, or set MASTER_ADDR"
    )


def _split(hostlist: str) -> Iterator[str]:
    """The entries between commas that stand outside brackets."""
    if re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]+\]|,)*", hostlist) is None:
        raise PlatformError(
            f"SLURM host list {hostlist}: the brackets do not match; check SLURM_JOB_NODELIST"
        )
    return (match.group() for match in re.finditer(r"(?:[^\[\],]|\[[^\[\]]+\])+", hostlist))


def _expand(entry: str) -> Iterator[str]:
    """The hosts of one entry: every combination of its bracketed ranges, the last varying fastest."""
    parts = re.split(r"(\[[^\]]+\])", entry)
    choices = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in parts]
    return ("".join(combination) for combination in itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    """``"1-3,05"`` as strings, leading zeros kept."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise PlatformError(f"SLURM host list: {item} is no number or range; check SLURM_JOB_NODELIST")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
