"""What a job that outlives its nodes cannot have is refused by name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_hexi.elastic.training.round import check_surviving
from megatron_hexi.errors import HexiError
from tests.megatron.test_uneven_training import THREE_AND_ONE
from tests.unit.replan.test_arguments import STAGES

GOOD = {
    "hexi_cluster": "cluster.yaml",
    "hexi_plan": "plan.yaml",
    "save": "checkpoints",
    "save_interval": 5,
    "load": None,
    "ckpt_format": "torch_dist",
    "async_save": False,
    "non_persistent_save_interval": None,
    "num_experts": None,
}


def test_a_job_that_can_go_on_is_taken():
    check_surviving(Namespace(**GOOD), set(), THREE_AND_ONE)
    check_surviving(Namespace(**GOOD | {"load": "checkpoints"}), {"--load"}, THREE_AND_ONE)
    check_surviving(Namespace(**GOOD | {"dataloader_type": "single"}), set(), THREE_AND_ONE)
    check_surviving(Namespace(**GOOD), set(), STAGES)
    check_surviving(Namespace(**GOOD | {"num_experts": 4}), set(), STAGES)


@pytest.mark.parametrize(
    ("changed", "given", "why"),
    [
        ({"hexi_cluster": None}, set(), "give --hexi-cluster cluster.yaml"),
        ({"save": None}, set(), "give --save FOLDER and --save-interval N"),
        ({"save_interval": None}, set(), "give --save FOLDER and --save-interval N"),
        ({"ckpt_format": "torch"}, set(), "--ckpt-format torch is tied to its number of ranks"),
        ({"async_save": True}, set(), "--async-save"),
        ({"non_persistent_save_interval": 2}, set(), "--non-persistent-save-interval"),
        ({"dataloader_type": "cyclic"}, set(), "--dataloader-type cyclic: the order .* single"),
        ({"dataloader_type": "external"}, set(), "--dataloader-type external: the script's .* single"),
        ({}, {"--finetune"}, "--finetune would undo"),
        ({}, {"--ckpt-step"}, "--ckpt-step would undo"),
        ({}, {"--context-parallel-size"}, "--context-parallel-size changes after a node failure"),
        ({"num_experts": 4}, set(), "does not say where the experts lie"),
        ({"load": "other"}, {"--load"}, "--load other is not --save checkpoints"),
    ],
)
def test_what_could_not_go_on_is_refused(changed, given, why):
    with pytest.raises(HexiError, match=why):
        check_surviving(Namespace(**GOOD | changed), given, THREE_AND_ONE)
