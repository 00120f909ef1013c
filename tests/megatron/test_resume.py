"""A training that was stopped goes on as if it had not been, in every format of the optimizer's state.

With torch's own Adam. What a format cannot do is refused by name.
"""

from __future__ import annotations

import re

import pytest

from tests.megatron.option_cases import Case
from tests.megatron.test_uneven_training import MODEL

RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
FORMATS = {
    "plain": (),
    "default": ("--use-distributed-optimizer",),
    "reshardable": RESHARDABLE,
    # Several buckets that end in padding.
    "small-buckets": (*RESHARDABLE, "--overlap-grad-reduce", "--ddp-bucket-size", "3000"),
    "torch": ("--ckpt-format", "torch"),
}
#: Of the undisturbed training, which is saved after the second.
ITERATIONS = 6
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
#: The plan that goes on, with its ranks; the plan that saved is `groups` of three.
LOADED_UNDER = {"same": ("groups", 3), "other": ("no-heads", 2), "none": (None, 1)}
#: In CI; the others on request. Fully reshardable state is resumed in `test_stages_jobs.py`, too.
IN_CI = {("default", "bf16", "other")}
MATRIX = [
    pytest.param(*case, id="-".join(case), marks=[] if case in IN_CI else pytest.mark.slow)
    for case in (
        (kind, precision, under) for kind in FORMATS for precision in PRECISIONS for under in LOADED_UNDER
    )
]


def words(kind, precision, *more):
    return [*MODEL, "--train-iters", str(ITERATIONS), *FORMATS[kind], *PRECISIONS[precision], *more]


@pytest.fixture(scope="module")
def undisturbed(forks, references, tmp_path_factory):
    """The training in a format and a precision, saved after two iterations."""
    made = {}

    def train(kind, precision):
        if (kind, precision) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{precision}")
            saving = ["--load", references(())[0], "--finetune", "--save", folder / "weights"]
            if kind == "torch":  # which cannot read the other format's weights
                saving = ["--save", folder / "weights"]
            log = forks.train(
                folder,
                ranks=3,
                args=words(kind, precision, *saving, "--save-interval", "2"),
                plan=Case().plans()["groups"],
            )
            (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
            made[kind, precision] = folder / "weights", log
        return made[kind, precision]

    return train


@pytest.mark.parametrize(("kind", "precision", "under"), MATRIX)
def test_the_iterations_after_a_load_are_those_of_the_undisturbed_training(
    kind, precision, under, undisturbed, forks, tmp_path
):
    weights, whole = undisturbed(kind, precision)
    name, ranks = LOADED_UNDER[under]
    log = forks.train(
        tmp_path,
        ranks=ranks,
        args=words(kind, precision, "--load", weights, *([] if under == "same" else ["--no-load-rng"])),
        plan=Case().plans()[name] if name else None,
        entry="tests.megatron.resumed",
    )
    assert set(re.findall("steps after the load: (.*)", log.output)) == {"[2.0], each its own"}
    assert log.iterations == list(range(3, ITERATIONS + 1))
    # bf16: under another plan products are rounded in another order.
    tolerance = 1e-5 if precision == "fp32" else 0 if under == "same" else 5e-3
    assert log.losses == pytest.approx(whole.losses[2:], rel=tolerance)


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        (
            "plain",
            FORMATS["default"],
            "the checkpoint was saved without --use-distributed-optimizer, this job trains with it",
        ),
        (
            "default",
            (*FORMATS["default"], "--tensor-model-parallel-size", "2"),
            "the checkpoint was saved with --tensor-model-parallel-size 1, this job has 2",
        ),
        (
            "default",
            (*FORMATS["small-buckets"][0:1], "--overlap-grad-reduce", "--ddp-bucket-size", "3000"),
            "in other buckets than this job has; train with the same --overlap-grad-reduce",
        ),
    ],
)
def test_what_a_format_cannot_do_is_refused_by_name(saved, loaded, says, undisturbed, forks, tmp_path):
    weights, _ = undisturbed(saved, "fp32")
    job = [*MODEL, "--train-iters", str(ITERATIONS), *loaded, "--load", weights]
    outcome = forks.launch(tmp_path, ranks=2, args=job)
    assert outcome.codes == [2, 2]
    for output in outcome.output:
        assert says in output
        assert "Traceback" not in output
