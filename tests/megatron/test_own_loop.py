"""examples/own_loop.py under uneven plans, beside Megatron-Core alone on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, Workload, write_plan
from tests.megatron.launch import REPOSITORY, launch

EXAMPLE = REPOSITORY / "examples" / "own_loop.yaml"
#: Two stages of two ranks, which hold 71 and 30 tokens.
STAGES = Plan(
    Workload(101, heads=6, kv_heads=2, head_dim=16, layers=2, hidden_size=96),
    (
        Replica(
            (Stage((Domain((Group(((0, 101),), (Member((0,), 71, (0, 4)), Member((1,), 30, (4, 6)))),)),)),)
        ),
    ),
)
Results = dict[str, tuple[list[float], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train_all(Path(__file__).parent / "own_loop_ranks.py", tmp_path_factory.mktemp("own-loop"))


def train_all(ranks_script: Path, folder: Path, replicas: Path = EXAMPLE) -> Results:
    """Return losses and weights of each job of a script, those of all its ranks together."""
    write_plan(STAGES, folder / "stages.yaml")
    script = [str(ranks_script), str(folder)]
    for ranks, plans in ((1, []), (4, [replicas, folder / "stages.yaml"])):
        ended = launch(folder, ranks=ranks, args=plans, entry=script, timeout=240)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found: Results = {}
    for path in sorted(folder.glob("*.pt")):
        losses, weights = torch.load(path)
        name = path.stem.rpartition("-")[0]
        known = found.setdefault(name, (losses, {}))
        assert losses == known[0], "reduce gives every rank the mean of all"
        for key, weight in weights.items():
            assert key not in known[1] or torch.equal(weight, known[1][key]), f"{name}: {key} differs by rank"
            known[1][key] = weight
    return found


@pytest.mark.parametrize(("job", "positions"), [("replicas", "rope"), ("stages", "learned")])
def test_losses_and_weights_are_those_of_one_rank(results: Results, job: str, positions: str):
    losses, weights = results[job]
    true_losses, true_weights = results[positions]
    assert losses == pytest.approx(true_losses, rel=1e-6)
    assert len(set(losses)) == len(losses)
    assert weights.keys() == true_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fault", "positions"), [("shifted rows", "rope"), ("no counts", "rope"), ("shifted places", "learned")]
)
def test_a_planted_fault_shows_in_the_first_loss(results: Results, fault: str, positions: str):
    found, true = results[fault][0][0], results[positions][0][0]
    assert abs(found - true) > 1e-5 * true
