"""Training with experts where stages differ is the training on one rank, whoever holds which of them."""

from __future__ import annotations

import pytest

from tests.megatron.conftest import job
from tests.megatron.option_cases import SELECTIVE
from tests.megatron.test_uneven_training import largest_difference
from tests.support.expert_layouts import EXPERTS, LAYERS, LAYOUTS, MICRO_BATCH, MICRO_BATCHES, expert_layout

#: Small experts, of which the first layer has none.
MODEL = (
    *("--num-layers", str(LAYERS), "--micro-batch-size", str(MICRO_BATCH), "--disable-bias-linear"),
    *("--global-batch-size", str(MICRO_BATCH * MICRO_BATCHES), "--calculate-per-token-loss"),
    *("--eval-iters", "0", "--num-experts", str(EXPERTS), "--moe-router-topk", "2"),
    *("--moe-ffn-hidden-size", "64", "--moe-shared-expert-intermediate-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-layer-freq", "[0]+[1]*5"),
)
SEQUENCE = ("--sequence-parallel",)


def balanced(*losses: str) -> tuple[str, ...]:
    """Balancing losses, large enough to be seen."""
    return ("--moe-router-load-balancing-type", *losses, "--moe-aux-loss-coeff", *("0.1" for _ in losses))


LOSSES = {
    "aux": (*balanced("aux_loss"), "--moe-z-loss-coeff", "0.01"),
    "sequences": balanced("seq_aux_loss"),
    "both": balanced("aux_loss", "seq_aux_loss"),
    "global": balanced("global_aux_loss"),
    "bias": (
        *("--moe-router-load-balancing-type", "none", "--moe-router-enable-expert-bias"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-bias-update-rate", "0.01"),
    ),
}
JOBS = {
    "": (),
    "moe": (*SELECTIVE, "moe"),
    "activations": (*SELECTIVE, "moe_act", "core_attn"),
    "overlapped": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
}
IN_CI = {("slices", "aux", ""), ("samples", "sequences", ""), ("replicas", "bias", "")}
ALL = [
    *((layout, "aux", "") for layout in LAYOUTS),
    *(
        (layout, loss, "")
        for layout in ("replicas", "samples", "slices", "dealt")
        for loss in ("sequences", "bias")
    ),
    *(("uneven", loss, "") for loss in ("both", "global")),
    *((layout, "aux", how) for layout in ("uneven", "slices") for how in JOBS if how),
]


@pytest.mark.parametrize(
    ("layout", "loss", "how", "iterations"),
    [
        *(pytest.param(*case, 4, id="-".join(filter(None, case))) for case in ALL if case in IN_CI),
        *(
            pytest.param(*case, 20, id="-".join(filter(None, (*case, "long"))), marks=pytest.mark.slow)
            for case in ALL
        ),
    ],
)
def test_experts_train_as_on_one_rank(layout, loss, how, iterations, forks, references, tmp_path):
    model = (*MODEL, *LOSSES[loss])
    weights, reference = references(model, iterations)
    plan = expert_layout(layout, tmp_path)
    words = [*job(model), "--train-iters", str(iterations), "--log-interval", "1", "--load", weights]
    log = forks.train(
        tmp_path, ranks=plan.ranks, args=[*words, "--finetune", *SEQUENCE, *JOBS[how]], plan=plan
    )
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5
