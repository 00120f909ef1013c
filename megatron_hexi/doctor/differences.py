"""Problems of a job: those of each machine, and differences between machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.places import ranges, spell_places, values_by_rank
from megatron_hexi.doctor.problems import Problem, Severity, worst_first
from megatron_hexi.doctor.rules import find_problems
from megatron_hexi.doctor.rules_fleet import FLEET_RULES

_ONE_IMAGE = "one container image for all nodes does it (docs/docker.md)"

#: Compared facts: name, severity of a difference, and how to read it.
_COMPARED: tuple[tuple[str, Severity, Callable[[Facts], str | None]], ...] = (
    ("megatron-hexi", "error", lambda facts: facts.package("megatron-hexi").version),
    ("torch", "error", lambda facts: facts.package("torch").version),
    ("NCCL", "error", lambda facts: facts.torch.nccl if facts.torch else None),
    ("CUDA in torch", "error", lambda facts: facts.torch.cuda if facts.torch else None),
    ("megatron-core", "error", lambda facts: facts.package("megatron-core").version),
    ("Transformer Engine", "error", lambda facts: facts.package("transformer-engine").version),
    ("apex", "warning", lambda facts: facts.package("apex").version),
    ("flash-attn", "warning", lambda facts: facts.package("flash-attn").version),
    ("flash-attn-3", "note", lambda facts: facts.package("flash-attn-3").version),
    ("Python", "warning", lambda facts: facts.python),
    ("NVIDIA driver", "note", lambda facts: facts.driver.version),
)

#: Variables that name something of one machine, or only affect output: they may differ.
_OF_ONE_MACHINE = (
    *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_GRAPH_FILE", "NCCL_HOSTID", "NCCL_IB_HCA"),
    *("NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"),
)


def find_job_problems(facts: Sequence[Facts], silent: Sequence[int] = ()) -> list[Problem]:
    """Return all problems of a job: of each machine, and differences between machines.

    Args:
        facts: facts of the ranks that answered, in rank order; one without a rank where there is no job.
        silent: the ranks that did not answer.
    """
    problems = list(_merged(facts))
    if silent:
        problems.append(
            Problem(
                "error",
                f"rank {ranges(silent)} did not answer in time",
                "see what that node's log says; start every rank with the same command",
            )
        )
    problems += _differences(facts)
    problems += [problem for rule in FLEET_RULES for problem in rule(facts)]
    return worst_first(problems)


def _merged(facts: Sequence[Facts]) -> Iterable[Problem]:
    """Yield each problem once, with all the ranks that have it."""
    having: dict[Problem, list[Facts]] = {}
    for rank_facts in facts:
        for problem in find_problems(rank_facts):
            having.setdefault(problem, []).append(rank_facts)
    for problem, ranks in having.items():
        where = "" if len(facts) == 1 else "everywhere" if len(ranks) == len(facts) else spell_places(ranks)
        yield Problem(problem.severity, problem.what, problem.remedy, where)


def _differences(facts: Sequence[Facts]) -> Iterable[Problem]:
    for name, severity, get in _COMPARED:
        values = [get(rank_facts) or "none" for rank_facts in facts]
        if len(set(values)) > 1:
            yield Problem(
                severity, f"{name} differs: {values_by_rank(facts, values)}", f"install one; {_ONE_IMAGE}"
            )
    shared = sorted(
        {name for rank_facts in facts for name in rank_facts.environment if name.startswith("NCCL_")}
        - {*_OF_ONE_MACHINE}
    )
    for name in shared:
        values = [rank_facts.environment.get(name, "not set") for rank_facts in facts]
        if len(set(values)) > 1:
            yield Problem(
                "warning",
                f"{name} differs: {values_by_rank(facts, values)}",
                "set it alike everywhere, or nowhere: NCCL hangs where ranks choose differently",
            )
