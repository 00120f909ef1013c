"""Kinds of rules for options in a job with a plan: supported, as a test shows, replaced, or refused.

A condition names flags as on the command line, and alternatives are joined by ``or``::

    --swiglu                                   the flag is given
    no --swiglu                                it is not given
    --recompute-granularity full|selective     its value, or one of its values, is one of these
    --position-embedding-type not rope|none    its value is none of these
    --min-lr > --lr, --log-interval < 1        its number is above, or below, another's or a constant
    --log-memory-interval % --log-interval     its number is no multiple of the other's
"""

from __future__ import annotations

import functools
import operator
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from megatron_hexi.options.parser import Row, read_rows
from megatron_hexi.plan.flags import argument_name

_COMPARED: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "<": (operator.lt, "below {}"),
    ">": (operator.gt, "above {}"),
    "%": (lambda number, divisor: divisor == 0 or number % divisor != 0, "that is no multiple of {}"),
}


def is_given(args: Namespace, flag: str) -> bool:
    """Return whether a job uses an option; 0 where Megatron's default is a number, and off, are no use."""
    row = row_of(flag)
    value = value_of(args, flag)
    if row.kind == "false":
        return value is False
    return bool(value) or (value is not None and value is not False and row.default is None)


def value_of(args: Namespace, flag: str) -> Any:
    """Return the argument that a flag sets; ``None`` where it is not given, or another version lacks it."""
    return getattr(args, row_of(flag).dest, None)


def items_of(value: Any) -> list[Any]:
    """Return the values of an argument that takes one or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def holds(condition: str, args: Namespace) -> bool:
    """Whether a condition holds for the arguments of a job."""
    return any(_holds(alternative.split(), args) for alternative in condition.split(" or "))


def _holds(words: list[str], args: Namespace) -> bool:
    if words[0] == "no":
        return not is_given(args, words[1])
    flag, *rest = words
    if not rest:
        return is_given(args, flag)
    value = value_of(args, flag)
    if rest[0] in _COMPARED:
        other = value_of(args, rest[1]) if rest[1].startswith("--") else float(rest[1])
        are_numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
        return are_numbers and _COMPARED[rest[0]][0](value, other)
    # Megatron parses some names to members of an enumeration.
    values = {str(getattr(item, "name", item)) for item in items_of(value)}
    return values.isdisjoint(rest[-1].split("|")) == (rest[0] == "not")


def describe(condition: str, option: str) -> str:
    """Return a condition in words that follow "with"; empty where it is only that `option` is given."""
    return " or ".join(filter(None, (_words(text.split(), option) for text in condition.split(" or "))))


def _words(words: list[str], option: str) -> str:
    if words[0] == "no":
        return f"{words[1]} left out"
    flag, *rest = words
    flag = "" if flag == option else flag
    if not rest:
        return flag
    values = rest[-1].replace("|", " or ")
    if rest[0] in _COMPARED:
        if not flag and rest == [">", "0"]:
            return ""
        return f"{flag or 'a number'} {_COMPARED[rest[0]][1].format(values)}"
    if rest[0] == "not":
        return f"{flag} other than {values}" if flag else f"another value than {values}"
    return f"{flag or 'the value'} {values}"


@functools.cache
def _rows() -> Mapping[str, Row]:
    return {flag: row for row in read_rows() for flag in row.flags}


def row_of(flag: str) -> Row:
    """Return the recorded option of a flag, as the newest version that has it."""
    return _rows()[flag]


#: Circumstances in which a rule refuses an option. `any`: every plan. `unequal`: unequal replicas, or stages
#: that state their layers. `repeated`: unequal replicas of one repeated stage. `stages`: stages that state
#: their layers. `planned`: a plan made by the planner. `script`: the script ``megatron_hexi.pretrain_gpt``.
PlanKind = Literal["any", "unequal", "repeated", "stages", "planned", "script"]

#: What refuses an option in these circumstances, for error messages.
_BESIDE: Mapping[PlanKind, str] = {
    "any": "--hexi-plan",
    "unequal": "unequal replicas, or stages that have layers of their own",
    "repeated": "unequal replicas whose stages have no layers of their own",
    "stages": "stages that have layers of their own",
    "planned": "hexi plan",
    "script": "megatron_hexi.pretrain_gpt",
}

_TRAINING = "tests/megatron/test_option_training.py::test_losses_and_gradient_norms_are_those_without_a_plan"
_REFUSAL = "tests/megatron/test_option_refusals.py::test_an_option_is_refused_by_its_real_name"


#: Reasons that the rules of several options share.
UNSHOWN = "it is not tested under a plan yet"
DRAWS = "its random numbers would depend on the plan"


@dataclass(frozen=True)
class Supported:
    """A rule that a plan supports some options: training equals training without context parallelism.

    Args:
        flags: flags as on the command line, with a value if only that value is supported.
    """

    flags: str
    test: str
    note: str = ""


@dataclass(frozen=True)
class Replaced:
    """A rule that an option only chooses how fast, or in how much memory, the same function is trained.

    Its arguments take neutral values, and a line says what the plan does instead.

    Args:
        option: flag of the option, as on the command line.
        neutral: the value that each argument takes instead, by name, the option's own first; or a function
            that makes it of the argument's value.
        instead: clause that says what stands in the option's place.
        used: a function that tells whether the job uses the option; ``None``: its own argument is not
            neutral.
        values: values of the option, or options beside it, with which it is replaced; empty: all.
        beside: kind of plan with which the option is replaced.
    """

    option: str
    neutral: Mapping[str, Any] = field(repr=False)
    instead: str
    used: Callable[[Namespace], bool] | None = field(default=None, repr=False)
    values: str = ""
    beside: PlanKind = "any"

    @property
    def name(self) -> str:
        """A unique name of the rule."""
        return self.option + ("" if self.beside == "any" else f"-{self.beside}")

    @property
    def replaces_itself(self) -> bool:
        """Whether the option is replaced by resetting its own argument, rather than another option's."""
        return argument_name(self.option) in self.neutral

    def applies_to(self, args: Namespace) -> bool:
        """Return whether a job uses the option; an older version of Megatron may lack its arguments."""
        if self.used is not None:
            return self.used(args)
        name, value = next(iter(self.neutral.items()))
        return getattr(args, name, None) not in (value, None, False)

    def apply(self, args: Namespace) -> str:
        """Give the option's arguments their neutral values; return the line that says so."""
        name = argument_name(self.option)
        said = getattr(args, name) if self.replaces_itself else None
        said = said.name if isinstance(said, Enum) else said
        for name, value in self.neutral.items():
            if hasattr(args, name):
                setattr(args, name, value(getattr(args, name)) if callable(value) else value)
        shown = "" if isinstance(said, bool | list | None) else f" {said}"
        return f"{self.option}{shown}: {self.instead}"


@dataclass(frozen=True)
class Refused:
    """A rule that refuses an option in a job with a plan.

    Args:
        values: values of the option that are refused; empty: all values.
        against: other arguments beside which Megatron itself refuses the option; empty: the plan does.
        versions: versions of megatron-core in which the option is refused (PEP 440); empty: all.
    """

    option: str
    used: Callable[[Namespace], bool] = field(repr=False)
    reason: str
    remedy: str = "train without it"
    values: str = ""
    beside: PlanKind = "any"
    versions: str = ""
    against: str = ""

    @property
    def name(self) -> str:
        """A unique name of the rule; several rules may refuse one option, for different jobs."""
        beside = self.against.replace(" ", "_") or ("" if self.beside == "any" else self.beside)
        return self.option + (f"-{beside}" if beside else "") + self.versions

    @property
    def conflicts_with(self) -> str:
        """The kind of plan, or the program, that refuses the option, for the error message."""
        return self.against or _BESIDE[self.beside]

    @property
    def message(self) -> str:
        """The error message: the option, the reason and the remedy."""
        remedy = re.sub(r"\b(leave|train without) it\b", rf"\1 {self.option}", self.remedy)
        return f"{self.option} does not work with {self.conflicts_with}: {self.reason}; {remedy}"

    @property
    def test(self) -> str:
        """Name of the test that checks the rule's error message."""
        return f"{_REFUSAL}[{self.name}]"


def shown(flags: str, case: str, note: str = "") -> Supported:
    """Return a rule that a plan supports options, as a case of `test_option_training.py` shows."""
    return Supported(flags, f"{_TRAINING}[{case}]", note)


def given(option: str, reason: str, remedy: str = "train without it", versions: str = "") -> Refused:
    """Return a rule that refuses an option whenever it is set."""
    return Refused(option, _is(option), reason, remedy, versions=versions)


def other_than(usual: object, option: str, reason: str, remedy: str = "train without it") -> Refused:
    """Return a rule that refuses all values of an option except `usual`."""
    name = argument_name(option)
    return Refused(
        option,
        lambda args: getattr(args, name, usual) not in (usual, None),
        reason,
        remedy,
        f"any but {usual[0] if isinstance(usual, list) else usual}",
    )


def one_of(refused: Sequence[str], option: str, reason: str, remedy: str) -> Refused:
    """Return a rule that refuses an option if its value, or one of its values, is in `refused`."""
    name = argument_name(option)

    def used(args: Namespace) -> bool:
        return any(item in refused for item in items_of(getattr(args, name, None)))

    return Refused(option, used, reason, remedy, ", ".join(refused))


#: Refuses an option before megatron-core 0.19, which changed the patched code.
before_0_19 = functools.partial(
    Refused,
    reason="a plan patches its code in megatron-core 0.19 only",
    remedy="install megatron-core 0.19, or train without it",
    versions="<0.19",
)
#: Refuses an option with a plan whose replicas are unequal.
beside_unequal = functools.partial(Refused, beside="unequal")
#: Refuses an option with a plan whose stages state their layers.
beside_stages = functools.partial(Refused, beside="stages")


def before_planning(option: str, reason: str, remedy: str) -> Refused:
    """Return a rule that refuses an option in the planner only; a plan made by hand may train with it."""
    return Refused(option, _is(option), reason, remedy, beside="planned")


def beside_script(option: str, until: str | None = None) -> Refused:
    """Return a rule that refuses an option which our training script lacks before megatron-core `until`."""
    return Refused(
        option,
        _is(option),
        "that script does not have it",
        "use NVIDIA's script through … -m megatron_hexi.run pretrain_gpt.py",
        beside="script",
        versions=f"<{until}" if until else "",
    )


def _is(option: str) -> Callable[[Namespace], bool]:
    return lambda args: is_given(args, option)


def masks_documents(args: Namespace) -> bool:
    """Whether ``--dataloader-inter-document-masking`` is set; Megatron has this option since 0.19."""
    return getattr(args, "dataloader_inter_document_masking", False)


def is_packed(args: Namespace) -> bool:
    """Whether a sequence of the job holds several documents whose tokens do not attend to each other."""
    return masks_documents(args) or args.sft
