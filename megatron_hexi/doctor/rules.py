"""All rules, applied to the facts of one machine and of a job; rules about packages and patches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from megatron_hexi.doctor.facts import Facts, Package
from megatron_hexi.doctor.findings import (
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
from megatron_hexi.doctor.rules_communication import COMMUNICATION_RULES, GPU_RULES
from megatron_hexi.doctor.rules_fleet import FLEET_RULES
from megatron_hexi.grouping import grouped
from megatron_hexi.spelling import spell_numbers

_REINSTALL = "pip install --force-reinstall --no-deps"
#: Command to build a package on this machine, against the installed torch.
_REBUILD = f"{_REINSTALL} --no-build-isolation --no-cache-dir"

#: Packages of the extra ``gpu``, by pip's names.
_BUILT_HERE = {
    "transformer-engine": "'transformer-engine[pytorch]'",
    "flash-attn": "flash-attn",
    "mamba-ssm": "mamba-ssm",
    "causal-conv1d": "causal-conv1d",
}

#: Versions of Triton with which flash-linear-attention refuses the gradients of delta nets on Hopper: they
#: would be wrong (its issue 640, and `chunk_bwd_dqkwg` in fla/ops/common/chunk_o.py of 0.6.0).
_WRONG_ON_HOPPER = SpecifierSet(">=3.4.0,<3.7.1")


def _ourselves(facts: Facts) -> Iterator[Problem]:
    if facts.package("megatron-hexi").version is None:
        yield warning(
            "megatron-hexi is not installed, only found by PYTHONPATH: what it needs cannot be checked",
            "pip install . in its folder",
        )


def _needed(facts: Facts) -> Iterator[Problem]:
    for package in facts.packages:
        if package.needs is None:
            continue
        install = f"pip install '{package.name}{package.needs}'"
        if package.version is None and package.name == "ortools":
            remedy = "pip install 'megatron-hexi[plan]'"
            yield note("ortools is not installed: this machine can train, but not plan", remedy)
        elif package.version is None:
            yield error(f"{package.name} is not installed", install)
        elif not _in_range(package):
            what = f"{package.name} {package.version} is installed, and {package.needs} is needed"
            yield error(what, install)


def _broken(facts: Facts) -> Iterator[Problem]:
    missing = [package.name for package in facts.packages if package.version is None]
    for package in facts.packages:
        if package.broken is None or any(f"No module named '{name}'" in package.broken for name in missing):
            continue  # another rule reports the missing package
        if package.name in _BUILT_HERE:
            remedy = f"rebuild it for this torch: {_REBUILD} {_BUILT_HERE[package.name]}"
        elif package.needs is not None:
            remedy = f"install it again: {_REINSTALL} '{package.name}{package.needs}'"
        else:
            remedy = "build it again for this torch, or remove it"
        yield error(f"{package.name} {package.version} cannot be imported ({package.broken})", remedy)


def _optional(facts: Facts) -> Iterator[Problem]:
    """Report packages that Megatron's logs need, and those that it uses by default on a GPU."""
    if not facts.gpus:
        return
    if facts.package("tensorboard").version is None:
        yield note(
            "tensorboard is not installed: --tensorboard-dir writes nothing",
            "pip install tensorboard, where the last rank runs",
        )
    if facts.package("transformer-engine").version is None:
        yield warning(
            "Transformer Engine is not installed, and Megatron's layers are its own by default",
            "pip install --no-build-isolation 'megatron-hexi[gpu]', or train with --transformer-impl local",
        )
    if facts.package("apex").version is None:
        yield note(
            "apex is not installed, and Megatron's output layer adds gradients with its "
            "fused_weight_gradient_mlp_cuda by default, with Transformer Engine too",
            "build apex, or train with --no-gradient-accumulation-fusion",
        )


def _delta_nets(facts: Facts) -> Iterator[Problem]:
    """Report that gated delta nets will stop at their first backward pass."""
    fla, triton = facts.package("flash-linear-attention"), facts.package("triton")
    if fla.version is None or triton.version is None or facts.package("tilelang").version is not None:
        return
    hopper = any(gpu.capability[0] == 9 for gpu in facts.gpus)
    if hopper and _WRONG_ON_HOPPER.contains(triton.version, prereleases=True):
        yield warning(
            f"flash-linear-attention does not train gated delta nets on Hopper with Triton {triton.version}",
            "pip install tilelang, or a torch with Triton 3.7.1 or newer",
        )


def _cudnn(facts: Facts) -> Iterator[Problem]:
    """Report a cuDNN older than torch's, which Transformer Engine loads and torch refuses."""
    if facts.torch is not None and facts.torch.cudnn_folder:
        yield error(
            "another cuDNN than torch's is loaded, most likely the system's by Transformer Engine: torch "
            "refuses it, and attention by cuDNN with it",
            f"export LD_LIBRARY_PATH={facts.torch.cudnn_folder}:$LD_LIBRARY_PATH",
        )


def _patches(facts: Facts) -> Iterator[Problem]:
    core = facts.package("megatron-core")
    if core.needs is not None and not _in_range(core):
        return  # another rule reports it once
    for patch in facts.patches:
        if patch.state == "does not fit":
            yield problem_of("error", patch.problem)


def _in_range(package: Package) -> bool:
    # A container's own build ("2.13.0a0+… .nv26.06") counts as the version that it precedes.
    try:
        return package.version is not None and SpecifierSet(package.needs or "").contains(
            package.version, prereleases=True
        )
    except InvalidVersion:
        return package.broken is not None  # only its distribution's name is known


PACKAGE_RULES = (_ourselves, _needed, _broken, _optional, _delta_nets, _cudnn, _patches)


#: Parts that cannot be examined without torch.
_NEED_TORCH = ("kernels", "triton_lacks", "patches")

Rule = Callable[[Facts], Iterator[Problem]]


def _parts_unknown(facts: Facts) -> Iterator[Problem]:
    for part, reason in facts.unknown:
        if facts.torch is None and part in _NEED_TORCH:
            continue  # another rule reports that it is missing
        if part == "gpu_links" and any(other == "gpu_states" for other, _ in facts.unknown):
            continue  # the same program fails twice
        if part == "gpu_states" and "not a valid field" not in reason:  # an older driver's answer
            remedy = "reset the GPU (nvidia-smi -r as root) or restart the node; dmesg has the driver's lines"
            yield error(f"nvidia-smi fails: {reason}", remedy)
        else:
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


RULES: tuple[Rule, ...] = (*PACKAGE_RULES, *GPU_RULES, _checkout, *COMMUNICATION_RULES, _parts_unknown)


def find_problems(facts: Facts) -> list[Problem]:
    """Return all problems of one process and its machine, the worst first."""
    return worst_first([problem for rule in RULES for problem in rule(facts)])


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
    """
    problems = list(_merged(facts))
    if silent:
        remedy = "see what that node's log says; start every rank with the same command"
        problems.append(error(f"rank {spell_numbers(silent)} did not answer in time", remedy))
    problems += _differences(facts)
    problems += [problem for rule in FLEET_RULES for problem in rule(facts)]
    return worst_first(problems)


def _merged(facts: Sequence[Facts]) -> Iterable[Problem]:
    """Yield each problem once, with all the ranks that have it."""
    having = grouped((problem, rank_facts) for rank_facts in facts for problem in find_problems(rank_facts))
    for problem, ranks in having.items():
        where = "" if len(facts) == 1 else "everywhere" if len(ranks) == len(facts) else spell_places(ranks)
        yield replace(problem, where=where)


def _differences(facts: Sequence[Facts]) -> Iterable[Problem]:
    for name, severity, get in _COMPARED:
        values = [get(rank_facts) or "none" for rank_facts in facts]
        if len(set(values)) > 1:
            what = f"{name} differs: {values_by_rank(facts, values)}"
            yield Problem(severity, what, f"install one; {_ONE_IMAGE}")
    variables = {name for rank_facts in facts for name in rank_facts.environment if name.startswith("NCCL_")}
    for name in sorted(variables - {*_OF_ONE_MACHINE}):
        values = [rank_facts.environment.get(name, "not set") for rank_facts in facts]
        if len(set(values)) > 1:
            yield warning(
                f"{name} differs: {values_by_rank(facts, values)}",
                "set it alike everywhere, or nowhere: NCCL hangs where ranks choose differently",
            )
