"""Rules about packages and patches that are missing, too old, too new, or built for something else."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from megatron_hexi.doctor.facts import Facts, Package
from megatron_hexi.doctor.problems import Problem, error, note, problem_of, warning

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
            yield error(
                f"{package.name} {package.version} is installed, and {package.needs} is needed", install
            )


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
