"""Recorded fleets: the doctor says what a person needs of each mixed one, and nothing of uniform ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_hexi.doctor.facts import (
    Cpu,
    Driver,
    Facts,
    Gpu,
    GpuState,
    InfinibandPort,
    Interface,
    Limits,
    NetworkFacts,
    Package,
    Torch,
)
from megatron_hexi.doctor.machine import read_links, read_states
from megatron_hexi.doctor.rules import find_job_problems

FLEETS = Path(__file__).parent / "fleets"
KINDS = yaml.safe_load((FLEETS / "kinds.yaml").read_text())
NAMES = sorted(path.stem for path in FLEETS.glob("*.yaml") if path.stem != "kinds")
PACKAGES = (
    Package("megatron-hexi", "0.1.0"),
    Package("torch", "2.13.0", ">=2.11"),
    Package("megatron-core", "0.19.2", ">=0.19,<0.20"),
    Package("transformer-engine", "2.16.0"),
    Package("apex", "0.1"),
    Package("tensorboard", "2.20"),
)
CODE = ("sm_80", "sm_89", "sm_90", "sm_100")
#: What test_doctor_rules.py says of versions and variables that differ.
_OF_OTHER_RULES = ("NVIDIA driver differs",)


def ports(node: dict[str, Any]) -> tuple[InfinibandPort, ...]:
    other = "Ethernet" if node["layer"] == "InfiniBand" else "InfiniBand"
    of_layer = {**node["cards"], **node.get("slow_cards", {})}
    layers = [(of_layer, node["layer"]), (node.get("other_cards", {}), other)]
    return tuple(
        InfinibandPort(card, port, "ACTIVE", f"{rate} Gb/sec (4X)", layer, node["vendor"])
        for cards, layer in layers
        for card, rate in cards.items()
        for port in range(1, 1 + node.get("ports", 1))
    )


def interfaces(number: int, node: dict[str, Any]) -> tuple[Interface, ...]:
    found = [Interface("lo", True, None, ("127.0.0.1",), ("127.0.0.0/8",), 65536)]
    if node.get("docker"):
        found.append(Interface("docker0", True, 10000, ("172.17.0.1",), ("172.17.0.0/16",), 1500))
    for name, one in node["ethernet"].items():
        address = one["network"].split(".0/")[0] + f".{number + 1}"
        address = address if address.count(".") == 3 else f"{address.rpartition('.')[0]}.0.{number + 1}"
        found.append(Interface(name, True, one["speed"], (address,), (one["network"],), one["mtu"]))
    return tuple(found)


def facts_of(nodes: dict[str, Any], gpus: int = 2) -> list[Facts]:
    found = []
    for number, (host, changes) in enumerate(nodes.items()):
        node = {**KINDS[changes["kind"]], **changes}
        state = {**KINDS[changes["kind"]]["state"], **changes.get("state", {})}
        gpu = Gpu(node["gpu"]["name"], tuple(node["gpu"]["capability"]), node["gpu"]["memory_gib"])
        states = tuple(GpuState(gpu.name, **state) for _ in range(gpus))
        network = interfaces(number, node)
        for local in range(gpus):
            found.append(
                Facts(
                    host=host,
                    rank=number * gpus + local,
                    python="3.12.3",
                    executable="/usr/bin/python",
                    packages=PACKAGES,
                    torch=Torch("12.8", "92300", node["nccl"], CODE),
                    driver=Driver(node["driver"], "13.0"),
                    gpus=(gpu,) * gpus,
                    gpu_states=states,
                    gpu_links=tuple(
                        tuple("X" if other == one else node["link"] for other in range(gpus))
                        for one in range(gpus)
                    ),
                    cpu=Cpu(**node["cpu"]),
                    nccl_plugins=tuple(node.get("plugins", ())),
                    network=NetworkFacts(network, ports(node), network[-1].addresses),
                    limits=Limits(64.0, None),
                    environment=node.get("environment", {}),
                )
            )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_fleet_gets_the_findings_that_it_needs(name):
    fleet = yaml.safe_load((FLEETS / f"{name}.yaml").read_text())
    problems = [
        problem
        for problem in find_job_problems(facts_of(fleet["nodes"]))
        if not problem.what.startswith(_OF_OTHER_RULES)
    ]
    for expected in fleet["expect"]:
        (problem,) = [one for one in problems if expected["what"] in one.what]
        assert problem.severity == expected["severity"]
        assert expected["remedy"] in problem.remedy
    assert len(problems) == len(fleet["expect"]), [problem.what for problem in problems]


def test_what_remedies_export_silences_the_findings():
    """Each fleet again, with what its findings said to export on each host."""
    checked = 0
    for name in NAMES:
        fleet = yaml.safe_load((FLEETS / f"{name}.yaml").read_text())
        exports = {host: dict(node.get("environment", {})) for host, node in fleet["nodes"].items()}
        for problem in find_job_problems(facts_of(fleet["nodes"])):
            for host, variables in exported(problem.remedy, list(exports)):
                exports[host].update(variables)
                checked += 1
            if problem.remedy.startswith("unset "):
                for variables in exports.values():
                    variables.pop(problem.remedy.split()[1])
        nodes = {host: {**node, "environment": exports[host]} for host, node in fleet["nodes"].items()}
        left = [one for one in find_job_problems(facts_of(nodes)) if exported(one.remedy, list(exports))]
        # Cards of several vendors may work; only a test can tell.
        assert [one.what for one in left if "vendors of network cards" not in one.what] == []
    assert checked >= 20


def exported(remedy: str, hosts: list[str]) -> list[tuple[str, dict[str, str]]]:
    """The variables that a remedy exports, by host."""
    found = []
    for part in remedy.split("; "):
        before, colon, words = part.partition("export ")
        if colon:
            where = hosts if "every node" in words else before.strip(" :").removeprefix("on ").split(", ")
            pairs = [word.split("=", 1) for word in words.split() if "=" in word]
            found += [(host, dict(pairs)) for host in where if host in hosts]
    return found


SMI = """\
NVIDIA H100 80GB HBM3, Enabled, Enabled, Disabled, 700.00, 700.00, 1980, 0x0000000000000001
NVIDIA H100 80GB HBM3, Disabled, [N/A], [N/A], 500.00, 700.00, 1980, 0x0000000000000048
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-55,112-167\t0\t\tN/A
NIC0\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""


def test_what_nvidia_smi_says_is_read():
    first, second = read_states(SMI)
    assert first == GpuState("NVIDIA H100 80GB HBM3", True, True, False, 700, 700, 1980, ())
    assert second.slowed == ("hardware slowdown", "heat")
    assert (second.persistence, second.ecc, second.mig) == (False, None, None)
    assert read_links(TOPOLOGY) == (("X", "NV18"), ("NV18", "X"))
    assert read_links("") == ()
