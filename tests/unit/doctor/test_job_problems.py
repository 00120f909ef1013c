"""Problems of a whole job: ranks and nodes that disagree, or never came."""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.doctor.facts import (
    Facts,
    Package,
)
from megatron_hexi.doctor.rules import find_job_problems
from tests.unit.doctor.test_rules import A100, a_node, with_package, with_variables


def a_job(nodes: dict[str, Facts], each: int = 2) -> list[Facts]:
    facts = [replace(node, host=host) for host, node in nodes.items() for _ in range(each)]
    return [replace(own, rank=rank) for rank, own in enumerate(facts)]


def with_nccl(facts: Facts, version: str) -> Facts:
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, nccl=version))


def test_a_job_that_agrees_is_healthy() -> None:
    assert find_job_problems(a_job({"a": a_node(), "b": a_node(gpus=(A100,) * 8)})) == []


def test_nodes_that_disagree_are_named_with_what_they_have() -> None:
    facts = a_job({"a": a_node(), "b": with_nccl(a_node(), "2.26.2"), "c": a_node()})
    (problem,) = find_job_problems(facts)
    assert problem.severity == "error"
    assert problem.what == "NCCL differs: 2.30.4 on a (rank 0-1), c (rank 4-5); 2.26.2 on b (rank 2-3)"
    assert "container image" in problem.remedy


def test_a_package_on_some_nodes_only() -> None:
    facts = a_job({"a": a_node(), "b": with_package(a_node(), Package("flash-attn", None))})
    (problem,) = find_job_problems(facts)
    assert problem.what == "flash-attn differs: 2.8.3 on a (rank 0-1); none on b (rank 2-3)"
    assert problem.severity == "warning"


def test_variables_must_agree_unless_they_name_something_of_a_node() -> None:
    here = with_variables(a_node(), NCCL_PROTO="Simple", NCCL_SOCKET_IFNAME="eth0", NCCL_IB_HCA="mlx5_0")
    there = with_variables(a_node(), NCCL_SOCKET_IFNAME="=eth0")
    (problem,) = find_job_problems(a_job({"a": here, "b": there}, each=1))
    assert problem.what == "NCCL_PROTO differs: Simple on a (rank 0); not set on b (rank 1)"


def test_a_problem_of_several_ranks_is_said_once() -> None:
    ill = with_variables(a_node(), NCCL_P2P_DISABLE="1")
    (problem,) = find_job_problems(a_job({"a": ill, "b": ill}))
    assert problem.where == "everywhere"
    problems = find_job_problems(a_job({"a": ill, "b": a_node()}))
    assert [problem.where for problem in problems if "GPUs of a node" in problem.what] == ["a (rank 0-1)"]


def test_ranks_that_never_came_are_named() -> None:
    facts = [own for own in a_job({"a": a_node(), "b": a_node()}, each=4) if own.rank not in (3, 5, 6)]
    (problem,) = find_job_problems(facts, silent=[3, 5, 6])
    assert problem.severity == "error"
    assert problem.what == "rank 3, 5-6 did not answer in time"
