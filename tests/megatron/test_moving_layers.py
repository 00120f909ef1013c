"""Layers move between ranks of a running job, in rounds that begin in order: no bit of the state changes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_hexi.plan import dump_plan
from tests.megatron.conftest import job as job_words
from tests.megatron.copied_bytes import check_least, files_held
from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_elastic import check_losses, words
from tests.megatron.test_elastic_stages import ALL_CHOSEN, FOUR_LAYERS, HEAD, WITH_EXPERTS, staged
from tests.megatron.test_stages_experts import MODEL as EXPERTS
from tests.megatron.test_stages_experts import balanced
from tests.megatron.test_stages_states import GROUP_BEHIND_UNIT, MAMBA_PATTERN
from tests.megatron.test_stages_training import DENSE_HEADER
from tests.megatron.test_stages_training import MODEL as IN_SIX
from tests.support.expert_layouts import HEADER

#: The plans of five moves, among three: each of their pairs once and again in another way.
FIVE_MOVES = (0, 1, 2, 0, 2, 1)
#: Ranks measure some iterations of a round before they ask for another plan.
ITERATIONS_OF_ROUND = 8


@dataclass(frozen=True)
class Case:
    """A job whose layers move.

    Args:
        stages: of its three plans.
        ranks: of each node.
        model: Megatron's arguments of the model.
        head: of the plans.
        is_exact: no node has a part of a layer.
    """

    stages: tuple[str, ...]
    ranks: dict[str, int]
    model: tuple[str, ...] = FOUR_LAYERS
    head: str = HEAD
    is_exact: bool = True


def three(*layers: tuple[int, int]) -> str:
    """Stages of one rank each that begin and end with these layers."""
    entries = (f"  - {{layers: {list(own)}, domains: [{{ranks: [{n}]}}]}}" for n, own in enumerate(layers))
    return "\n" + "\n".join(entries) + "\n"


DUO = {"duo": 2, "n1": 1, "n2": 1}
REPLICAS = """
  - {{layers: [0, {0}], domains: [{{ranks: [0]}}]}}
  - {{layers: [{0}, 4], domains: [{{ranks: [1, 2]}}]}}
- stages:
  - {{layers: [0, 4], domains: [{{ranks: [3]}}]}}
"""
IN_TURN = """
  - {{layers: [0, {0}], ministages: {1}, domains: [{{ranks: [0], samples: 2}}, {{ranks: [1], samples: 2}}]}}
  - {{layers: [{0}, 6], ministages: {2}, domains: [{{ranks: [2]}}]}}
"""
CASES = {
    "stages": Case(
        (three((0, 2), (2, 3), (3, 4)), three((0, 1), (1, 2), (2, 4)), three((0, 1), (1, 3), (3, 4))),
        {"n0": 1, "n1": 1, "n2": 1},
    ),
    "replicas": Case(tuple(map(REPLICAS.format, (3, 1, 2))), DUO, is_exact=False),
    "ministages": Case(
        tuple(IN_TURN.format(*sizes) for sizes in ((3, "[2, 1]", "[1, 2]"), (4, 2, 2), (2, 2, 2))),
        {"n0": 1, "n1": 1, "n2": 1},
        tuple(job_words(IN_SIX)),
        DENSE_HEADER + "- stages:\n",
    ),
    "experts": Case(
        tuple(
            WITH_EXPERTS.replace("[0, 4]", f"[0, {layers}]")
            .replace("[4, 6]", f"[{layers}, 6]")
            .replace("[3, 8]", f"[{experts}, 8]")
            .replace("[0, 3]}", f"[0, {experts}]}}")
            for layers, experts in ((4, 3), (2, 3), (3, 5))
        ),
        DUO,
        tuple(job_words((*EXPERTS, *balanced("aux_loss"), *ALL_CHOSEN, "--sequence-parallel"))),
        f"{HEADER}- stages:\n",
        is_exact=False,
    ),
    "mamba": Case(
        tuple(
            GROUP_BEHIND_UNIT.replace("[0, 1]", f"[0, {cut}]", 1).replace("[1, 6]", f"[{cut}, 6]")
            for cut in (1, 3, 2)
        ),
        DUO,
        tuple(job_words((*IN_SIX, *MAMBA_PATTERN))),
        DENSE_HEADER,
    ),
}
#: One move, of two nodes, which hold all of each other's state: bytes are those of arguments.
QUICK = replace(CASES["stages"], ranks={"duo": 2, "n1": 1})


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "order"),
    [
        pytest.param(QUICK, (0, 1), id="quick"),
        *(pytest.param(case, FIVE_MOVES, id=name, marks=pytest.mark.slow) for name, case in CASES.items()),
    ],
)
def test_layers_move_and_no_bit_changes(case, order, forks, tmp_path):
    plans = [staged(case.stages[number], case.head) for number in order]
    iterations = ITERATIONS_OF_ROUND * len(plans)
    args = words(tmp_path, plans[0], dict.fromkeys(case.ranks, 1.0), iterations, 1000, case.ranks, case.model)
    (tmp_path / "plans.json").write_text(json.dumps([dump_plan(plan) for plan in plans]))
    launcher = ("--copy-interval", "2", "--max-losses", "0")
    script = ("--script", str(REPOSITORY / "tests/megatron/moving.py"))
    most = str(len(case.ranks))
    with ElasticJob(
        tmp_path, f"{most}:{most}", [*args, "--hexi-replan-interval", "2"], case.ranks, (*launcher, *script)
    ) as job:
        job.start(*case.ranks)
        assert set(job.wait_for_end(600).values()) == {0}, job.said()[-4000:]
        decisions, said = job.decisions(), job.said()
        ends = [int(n) for n in re.findall(r"iteration (\d+): saved; starts again with other layers", said)]
        assert len(ends) == len(decisions) - 1 == len(plans) - 1
        assert all("no iteration is done again" in line for line in job.rounds()[1:])
        print("\n".join(job.rounds() + job.told("has finished")))
        moved = job.moved()
        check_losses(job, forks, tmp_path, plans[0], iterations, case.model)
    for end, (came, least), (saved, loaded) in zip(ends, moved, pairwise(decisions), strict=True):
        print(f"after iteration {end}: {came} MB came, of {least} MB")
        assert_equal_states(*(tmp_path / kind / f"iter_{end:07d}" for kind in ("kept", "again")))
        assert came < 2.1 * least + 0.01  # a chunk comes whole, also where a rank reads half of it
        if case.is_exact:
            copy, files = tmp_path / "kept" / f"iter_{end:07d}", loaded["copy"]["files"]
            assert came < 1.1 * check_least(least, copy, files_held(files, saved), loaded)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and moments of a checkpoint."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def assert_equal_states(before: Path, after: Path) -> None:
    """Compare two checkpoints bit by bit."""
    saved, again = tensors(before), tensors(after)
    assert saved.keys() == again.keys()
    assert any("exp_avg" in name for name in saved)
    assert not [name for name, tensor in saved.items() if not torch.equal(tensor, again[name])]
