"""How an option may stand beside a plan: carried out, as a test shows, or refused for a reason."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: What an option may be refused beside: any plan, unequal replicas, those of them whose one stage the job
#: repeats, stages of their own layers (which make replicas unequal too), a plan that the planner makes, or
#: the script ``megatron_hexi.pretrain_gpt``.
PlanKind = Literal["any", "unequal", "repeated", "stages", "planned", "script"]

_TRAINING = "tests/megatron/test_option_training.py::test_losses_and_gradient_norms_are_those_without_a_plan"
_REFUSAL = "tests/megatron/test_option_refusals.py::test_an_option_is_refused_by_its_real_name"


#: Reasons that several options share.
UNSHOWN = "it is not tested under a plan yet"
DRAWS = "its random numbers would depend on the plan"


@dataclass(frozen=True)
class Supported:
    """Options that a plan carries out: the training is that without context parallelism.

    Args:
        flags: as on the command line, with a value where only that one is meant.
        test: the test that shows it.
        note: what else there is to know.
    """

    flags: str
    test: str
    note: str = ""


@dataclass(frozen=True)
class Refused:
    """One option that a plan does not carry out.

    Args:
        option: the flag, as on the command line.
        used: whether the job uses it.
        reason: why a plan cannot carry it out.
        remedy: what to do instead.
        values: which values of the option are refused; empty: any.
        beside: which plans it is refused beside.
        versions: of megatron-core in which it is refused (PEP 440); empty: all.
    """

    option: str
    used: Callable[[Namespace], bool] = field(repr=False)
    reason: str
    remedy: str = "train without it"
    values: str = ""
    beside: PlanKind = "any"
    versions: str = ""

    @property
    def name(self) -> str:
        """Tells it from all others: an option may be refused for several reasons in different jobs."""
        return self.option + ("" if self.beside == "any" else f"-{self.beside}") + self.versions

    @property
    def what(self) -> str:
        """What it does not work with."""
        return {
            "any": "--hexi-plan",
            "unequal": "unequal replicas",
            "repeated": "unequal replicas whose stages have no layers of their own",
            "stages": "stages that have layers of their own",
            "planned": "hexi plan",
            "script": "megatron_hexi.pretrain_gpt",
        }[self.beside]

    @property
    def message(self) -> str:
        """What a user is told: the option, the reason and the remedy."""
        return f"{self.option} does not work with {self.what}: {self.reason}; {self.remedy}"

    @property
    def test(self) -> str:
        """The test of its message."""
        return f"{_REFUSAL}[{self.name}]"


def shown(flags: str, case: str, note: str = "") -> Supported:
    """Shown by a case of the one test of real training, under plans that are uneven in different ways."""
    return Supported(flags, f"{_TRAINING}[{case}]", note)


def given(
    option: str,
    reason: str,
    remedy: str = "train without it",
    name: str | None = None,
    since: str | None = None,
    until: str | None = None,
) -> Refused:
    """Refused when set to anything but nothing.

    Args:
        option: the flag.
        reason: why a plan cannot carry it out.
        remedy: what to do instead.
        name: of the argument, if not the flag's.
        since: the first version of megatron-core in which it is.
        until: the first in which it is no longer.
    """
    versions = ",".join(filter(None, (since and f">={since}", until and f"<{until}")))
    return Refused(option, _set(option, name), reason, remedy, versions=versions)


def other_than(usual: object, option: str, reason: str, remedy: str = "train without it") -> Refused:
    """Refused when set to another value than the usual one."""
    name = option.removeprefix("--").replace("-", "_")
    return Refused(
        option,
        lambda args: getattr(args, name, usual) not in (usual, None),
        reason,
        remedy,
        f"any but {usual[0] if isinstance(usual, list) else usual}",
    )


def one_of(refused: Sequence[str], option: str, reason: str, remedy: str) -> Refused:
    """Refused when set to one of some values, or to several of which one is refused."""
    name = option.removeprefix("--").replace("-", "_")

    def used(args: Namespace) -> bool:
        value = getattr(args, name, None)
        return any(item in refused for item in (value if isinstance(value, list) else [value]))

    return Refused(option, used, reason, remedy, ", ".join(refused))


def with_fused_rotary(option: str) -> Refused:
    """Refused beside Megatron's fused rotary kernel."""
    name = option.removeprefix("--").replace("-", "_")
    return Refused(
        option,
        lambda args: getattr(args, name, False) and args.apply_rope_fusion,
        "the fused rotary kernel supports equal shards only",
        "give --no-rope-fusion too",
        "without --no-rope-fusion",
    )


def before_0_19(option: str, used: Callable[[Namespace], bool]) -> Refused:
    """Carried out with megatron-core 0.19 only, which changed what is replaced for it."""
    reason, remedy = (
        "megatron-core split it elsewhere before 0.19",
        "install megatron-core 0.19, or train without it",
    )
    return Refused(option, used, reason, remedy, versions="<0.19")


def beside_unequal(
    option: str, used: Callable[[Namespace], bool], reason: str, remedy: str, values: str = ""
) -> Refused:
    """Refused where the plan's replicas are unequal."""
    return Refused(option, used, reason, remedy, values, beside="unequal")


def beside_stages(
    option: str,
    used: Callable[[Namespace], bool],
    reason: str,
    remedy: str = "train without it",
    values: str = "",
) -> Refused:
    """Refused where the plan's stages have layers of their own."""
    return Refused(option, used, reason, remedy, values, beside="stages")


def before_planning(option: str, reason: str, remedy: str) -> Refused:
    """Refused by the planner alone; a plan made by hand may train with it."""
    return Refused(option, _set(option), reason, remedy, beside="planned")


def beside_script(option: str, until: str | None = None) -> Refused:
    """Refused by our own training script, before megatron-core `until`; NVIDIA's has it."""
    return Refused(
        option,
        _set(option),
        "that script does not have it",
        "use NVIDIA's script through torchrun … -m megatron_hexi.run pretrain_gpt.py",
        beside="script",
        versions=f"<{until}" if until else "",
    )


def _set(option: str, name: str | None = None) -> Callable[[Namespace], bool]:
    """Whether an option's argument is set to anything; an earlier version may not have it."""
    argument = name or option.removeprefix("--").replace("-", "_")
    return lambda args: bool(getattr(args, argument, None))


def masks_documents(args: Namespace) -> bool:
    """Whether ``--dataloader-inter-document-masking`` is given; Megatron has it since 0.19."""
    return getattr(args, "dataloader_inter_document_masking", False)


def is_packed(args: Namespace) -> bool:
    """Whether a sequence holds several documents that do not see each other."""
    return masks_documents(args) or args.sft
