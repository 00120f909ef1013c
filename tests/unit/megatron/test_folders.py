"""Folders of a job under a plan: what Megatron refuses by assertions without a message is refused by name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.folders import check_folders


def job(folder, **given):
    """Arguments of a job that saves in a folder; without `given`, as Megatron leaves them."""
    usual = {"hexi_plan": "plan.yaml", "save": str(folder), "save_interval": None, "load": None}
    usual |= {"pretrained_checkpoint": None, "non_persistent_ckpt_type": None, "ckpt_step": None}
    return Namespace(**usual | given)


@pytest.mark.parametrize("loads", [False, True])
def test_saving_without_an_interval_is_refused(tmp_path, loads):
    folder = tmp_path / "weights"
    args = job(folder, load=str(folder) if loads else None)
    with pytest.raises(HexiError) as refusal:
        check_folders(args)
    says = f"--save {folder}: nothing says how often it is written; add --save-interval ITERATIONS, or leave"
    assert str(refusal.value).startswith(says)
    args.hexi_plan = None  # a job without a plan is Megatron's to check
    check_folders(args)


@pytest.mark.parametrize("given", [{"save_interval": 2}, {"save_interval": 2, "save_retain_interval": 4}])
def test_a_usable_interval_is_taken(tmp_path, given):
    check_folders(job(tmp_path / "weights", **given))
    check_folders(job(tmp_path, save=None))
