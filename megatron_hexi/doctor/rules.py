"""Problems of one machine and of a job: all rules, applied to the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.problems import (
    Problem,
    Severity,
    error,
    note,
    problem_of,
    spell_places,
    values_by_rank,
    warning,
    worst_first,
)
from megatron_hexi.doctor.rules_communication import COMMUNICATION_RULES
from megatron_hexi.doctor.rules_fleet import FLEET_RULES
from megatron_hexi.doctor.rules_gpu import GPU_RULES
from megatron_hexi.doctor.rules_packages import PACKAGE_RULES
from megatron_hexi.spelling import spell_numbers

#: Parts that cannot be examined without torch.
_NEED_TORCH = ("kernels", "triton_lacks", "patches")

Rule = Callable[[Facts], Iterator[Problem]]


def find_problems(facts: Facts) -> list[Problem]:
    """Return all problems of one process and its machine, the worst first."""
    return worst_first([problem for rule in RULES for problem in rule(facts)])


def _parts_unknown(facts: Facts) -> Iterator[Problem]:
    for part, reason in facts.unknown:
        if facts.torch is None and part in _NEED_TORCH:
            continue  # another rule reports that it is missing
        if part == "gpu_links" and any(other == "gpu_states" for other, _ in facts.unknown):
            continue  # the same program fails twice
        if part == "gpu_states" and "not a valid field" not in reason:  # an older driver's answer
            yield error(
                f"nvidia-smi fails: {reason}",
                "reset the GPU (nvidia-smi -r as root) or restart the node; dmesg has the driver's lines",
            )
            continue
        yield warning(f"could not inspect {part} ({reason})", "fix that first, then run this again")


def _checkout(facts: Facts) -> Iterator[Problem]:
    checkout = facts.checkout
    if checkout is None:
        return
    if checkout.state == "unknown":
        yield problem_of("error", checkout.problem)
    elif checkout.state == "not patched":
        yield note(
            f"{checkout.path}: its training scripts do not import megatron_hexi",
            f"hexi patch {checkout.path}, or start them with -m megatron_hexi.run",
        )


RULES: tuple[Rule, ...] = (
    *PACKAGE_RULES,
    *GPU_RULES,
    _checkout,
    *COMMUNICATION_RULES,
    _parts_unknown,
)


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
            error(
                f"rank {spell_numbers(silent)} did not answer in time",
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
            yield warning(
                f"{name} differs: {values_by_rank(facts, values)}",
                "set it alike everywhere, or nowhere: NCCL hangs where ranks choose differently",
            )
