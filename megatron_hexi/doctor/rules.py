"""Rules that find problems of one machine in its facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.problems import Problem, problem_of, worst_first
from megatron_hexi.doctor.rules_communication import COMMUNICATION_RULES
from megatron_hexi.doctor.rules_gpu import GPU_RULES
from megatron_hexi.doctor.rules_packages import PACKAGE_RULES
from megatron_hexi.doctor.rules_state import STATE_RULES

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
            yield Problem(
                "error",
                f"nvidia-smi fails: {reason}",
                "reset the GPU (nvidia-smi -r as root) or restart the node; dmesg has the driver's lines",
            )
            continue
        yield Problem(
            "warning", f"could not inspect {part} ({reason})", "fix that first, then run this again"
        )


def _checkout(facts: Facts) -> Iterator[Problem]:
    checkout = facts.checkout
    if checkout is None:
        return
    if checkout.state == "unknown":
        yield problem_of("error", checkout.problem)
    elif checkout.state == "not patched":
        yield Problem(
            "note",
            f"{checkout.path}: its training scripts do not import megatron_hexi",
            f"hexi patch {checkout.path}, or start them with -m megatron_hexi.run",
        )


RULES: tuple[Rule, ...] = (
    *PACKAGE_RULES,
    *GPU_RULES,
    *STATE_RULES,
    _checkout,
    *COMMUNICATION_RULES,
    _parts_unknown,
)
