"""Gradients of a model in fp32 and in half precision, from one checkpoint, on one rank and under plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_hexi.plan import Plan
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import job
from tests.megatron.forked import ENTRY, Trainer
from tests.megatron.given_routes import FOLLOW, RECORD

#: In fp16 no gradient overflows at this scale, so no step is skipped.
PRECISIONS = {"bf16": ("--bf16",), "fp16": ("--fp16", "--loss-scale", "16")}
#: One step of SGD, after which its momentum is the gradient.
_STEP = (
    *("--optimizer", "sgd", "--clip-grad", "0", "--weight-decay", "0"),
    *("--train-iters", "1", "--save-interval", "1"),
)
_MOMENTUM = "optimizer.state.momentum_buffer."

type Gradients = Mapping[str, Tensor]


class Trial:
    """Trainings of one step from a checkpoint that is made first.

    Attributes:
        true: gradients in fp32 on one rank.
    """

    def __init__(self, forks: Trainer, folder: Path, model: tuple[str, ...], alone: Plan | None) -> None:
        """Make the checkpoint, and train in fp32 on one rank; with experts, record the routes.

        Args:
            forks: trains.
            folder: a folder that does not exist yet.
            model: arguments of the model.
            alone: plan of one rank; ``None``: no plan.
        """
        self._forks, self._folder, self._model, self._alone = forks, folder, model, alone
        saving = ("--train-iters", "1", "--save", folder / "start", "--save-interval", "1")
        forks.train(folder, ranks=1, args=[*job(model), *saving, "--no-save-optim"], plan=alone)
        self.true = self.gradients("fp32", routes=RECORD)

    def gradients(
        self,
        name: str,
        words: Iterable[str] = (),
        plan: Plan | None = None,
        routes: str = FOLLOW,
        entry: str = ENTRY,
        stages: int = 1,
    ) -> Gradients:
        """Train, and return the gradient of each weight by name.

        Args:
            name: name of the training's folder in the trial's.
            words: further arguments.
            plan: the plan; ``None``: one rank.
            routes: what becomes of the routes of a model with experts (`given_routes`).
            entry: the entry point of a model without experts.
            stages: pipeline stages of a plan that repeats one.
        """
        plan, folder = plan or self._alone, self._folder / name
        args: list[str | Path] = [
            *job((*self._model, *_STEP)),
            *(["--sequence-parallel"] if plan else []),
            *words,
        ]
        args += ["--load", self._folder / "start", "--finetune", "--save", folder / "saved"]
        if "--num-experts" in self._model:
            entry, args = "tests.megatron.given_routes", [routes, self._folder / "routes.pt", *args]
        ranks = stages * plan.ranks if plan else 1
        self._forks.train(folder, ranks=ranks, args=args, plan=plan, entry=entry)
        saved = tensors_of(folder / "saved" / "iter_0000001")
        return {key.removeprefix(_MOMENTUM): one.double() for key, one in saved.items() if _MOMENTUM in key}

    def folder(self, name: str) -> Path:
        """Return the folder of a training of this trial."""
        return self._folder / name


@dataclass(frozen=True)
class Errors:
    """Squares of the relative errors of gradients.

    Attributes:
        together: of all gradients together.
        each: of each gradient that is not zero, by name.
    """

    together: float
    each: Mapping[str, float]

    @staticmethod
    def of(found: Gradients, true: Gradients) -> Errors:
        """Return the errors of the gradients that were found."""
        assert found.keys() == true.keys()
        off = {key: float((found[key] - one).square().sum()) for key, one in true.items()}
        size = {key: float(one.square().sum()) for key, one in true.items()}
        each = {key: off[key] / size[key] for key in true if size[key]}
        return Errors(sum(off.values()) / sum(size.values()), each)


def ratios(found: Iterable[Errors], allowed: Iterable[Errors]) -> tuple[float, dict[str, float]]:
    """Return root mean squares of errors as multiples of the allowed ones: together, and of each gradient."""
    first, second = list(found), list(allowed)

    def ratio(values: Iterable[float], others: Iterable[float]) -> float:
        return (sum(values) / sum(others)) ** 0.5

    together = ratio((one.together for one in first), (one.together for one in second))
    return together, {
        key: ratio((one.each[key] for one in first), (one.each[key] for one in second))
        for key in first[0].each
    }


def part_in_bf16(gradients: Gradients) -> float:
    """Return the part of all gradients' elements that bf16 represents, not counting zeros."""
    ones = [one[one != 0].float() for one in gradients.values()]
    exact = sum(int((one.bfloat16().float() == one).sum()) for one in ones)
    return exact / sum(one.numel() for one in ones)
