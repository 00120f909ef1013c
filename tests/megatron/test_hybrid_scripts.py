"""NVIDIA's unmodified scripts for hybrid models train under a plan as our own entry does on one rank.

Set MEGATRON_LM to a Megatron-LM checkout of the installed version.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.test_option_training import steps
from tests.megatron.test_state_layers import LAYOUTS, LINEAR, MAMBA, plan_of
from tests.megatron.test_uneven_training import largest_difference

CHECKOUT = os.environ.get("MEGATRON_LM")
#: A Mamba layer, attention, a delta net and an MLP.
MODEL = ("--hybrid-layer-pattern", "M*G-", *MAMBA[2:], *LINEAR)


@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM is not set")
@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_mamba.py"])
def test_an_unmodified_script_trains_the_same(
    script: str, forks: Forks, references: References, tmp_path: Path
):
    start, reference = references(MODEL, 4)
    words: list[str | Path] = [Path(CHECKOUT or "") / script, *job(MODEL), *steps(4)]
    words += ["--load", start, "--finetune"]
    plan = plan_of(LAYOUTS["uneven-heads"])
    log = forks.train(tmp_path, ranks=3, args=words, plan=plan, entry="tests.megatron.scripted")
    assert largest_difference(log, reference) < 1e-5
