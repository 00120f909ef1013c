"""Megatron Bridge's own loop under uneven plans, beside Bridge alone on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import bridge_emulated
from tests.megatron.launch import launch

pytestmark = pytest.mark.skipif(
    not bridge_emulated.is_available(), reason="Megatron Bridge is not unpacked; see scripts/bootstrap.sh"
)

HEADER = """\
version: 2
workload: {seq_length: 101, heads: 4, kv_heads: 2, head_dim: 16, layers: 4, hidden_size: 64}
replicas:
"""
PLANS = {
    "one-stage": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 31], [69, 101]]
        members:
        - {ranks: [0], tokens: 38, heads: [0, 2]}
        - {ranks: [1], tokens: 25, heads: [2, 4]}
      - segments: [[31, 69]]
        members:
        - {ranks: [2], tokens: 13, heads: [0, 1]}
        - {ranks: [3], tokens: 25, heads: [1, 4]}
""",
    "replicas": """\
- micro_batches: 3
  stages:
  - domains:
    - groups:
      - segments: [[0, 40], [70, 101]]
        members:
        - {ranks: [0], tokens: 50, heads: [0, 3]}
        - {ranks: [1], tokens: 21, heads: [3, 4]}
      - segments: [[40, 70]]
        members:
        - {ranks: [2], tokens: 30, heads: [0, 4]}
- micro_batches: 1
  stages:
  - domains: [{ranks: [3]}]
""",
    "pipeline": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0], tokens: 71, heads: [0, 3]}
        - {ranks: [1], tokens: 30, heads: [3, 4]}
""",
    "stages": """\
- micro_batches: 3
  stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - layers: [1, 4]
    domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [2], tokens: 71, heads: [0, 3]}
        - {ranks: [3], tokens: 30, heads: [3, 4]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [1]}]}
""",
}
#: A plan that goes on from checkpoints alone.
MINISTAGES = """\
- micro_batches: 3
  stages:
  - layers: [0, 2]
    ministages: 2
    domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0], tokens: 71, heads: [0, 3]}
        - {ranks: [1], tokens: 30, heads: [3, 4], state: 4}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
"""
SCRIPT = Path(__file__).parent / "bridge_script.py"
Results = dict[str, tuple[list[float], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of each job: on one rank by Bridge alone, and on four under each plan."""
    folder = tmp_path_factory.mktemp("bridge")
    for name, replicas in (*PLANS.items(), ("ministages", MINISTAGES)):
        (folder / f"{name}.yaml").write_text(HEADER + replicas)
    for ranks, words in ((1, ()), (4, ("--hexi-plan", folder / "one-stage.yaml")), (1, ())):
        args = (SCRIPT, folder, *words)
        ended = launch(folder, ranks=ranks, args=args, entry="tests.megatron.bridge_run", timeout=240)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return read_results(folder)


def read_results(folder: Path) -> Results:
    """Return losses and weights of each job, after a check that ranks agree on their weights."""
    found: Results = {}
    for path in sorted(folder.glob("*.pt")):
        losses, weights = torch.load(path)
        name = path.stem.rpartition("-")[0]
        known = found.setdefault(name, ([], {}))
        known[0].extend([] if known[0] else losses)
        for key, weight in weights.items():
            assert key not in known[1] or torch.equal(weight, known[1][key]), f"{name}: {key} differs by rank"
            known[1][key] = weight
    return found


@pytest.mark.parametrize("job", PLANS)
def test_losses_and_weights_are_those_of_one_rank(results: Results, job: str):
    losses, weights = results[job]
    true_losses, true_weights = results["alone"]
    assert len(losses) == 10 + 1  # one of validation
    assert len(set(losses)) == len(losses)
    assert losses == pytest.approx(true_losses, rel=1e-5)
    assert weights.keys() == true_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("job", ["there", "back", "stages-there", "stages-on", "stages-back"])
def test_a_checkpoint_goes_on_under_a_plan_and_without(results: Results, job: str):
    losses, weights = results[job]
    true_losses, true_weights = results["alone"]
    assert losses == pytest.approx(true_losses[5:10], rel=1e-5)
    for name, weight in true_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


def test_a_planted_fault_shows_in_the_first_loss(results: Results):
    found, true = results["fault"][0][0], results["alone"][0][0]
    assert abs(found - true) > 1e-5 * true


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "grid",
            "dist.use_decentralized_pg True: its groups are not those of the plan",
        ),
        ("length", "workload.seq_length is 101, but the job has --seq-length 100"),
        ("context", "but the job has --context-parallel-size 2; give --context-parallel-size 4"),
        ("dropout", "--hidden-dropout"),
        ("validation", "validation.eval_global_batch_size 8: the replicas of a plan share out batches of"),
        (
            "loader",
            "dataset.dataloader_type external: its batches are not shared out by a plan; give single,",
        ),
        ("epochs", "train.num_epochs 2: a plan's batches are counted in iterations; leave train.num_epochs"),
        ("own", "model OwnModel: builds a model of its own, and a plan carries out that of GPTModelProvider"),
        ("image", "model ImageModel: its tokens of an image attend to later ones of it, which a plan's"),
        (
            "dealt",
            "model.vision_dp_when_cp True: a plan divides images, by patches of its units; leave model.",
        ),
        ("apart", "model.dist_train.use_dist_train True: a plan divides images"),
        ("export", "checkpoint.also_save_hf_checkpoint True: its export gathers weights by Bridge's groups"),
        ("ranks", "need 4 ranks, but the job has 1; start 4 ranks or use another plan"),
        ("record", "--hexi-record: needs Megatron-LM's loop; leave it out"),
        ("kernel", "--hexi-kernel"),
    ],
)
def test_what_a_plan_does_not_support_is_refused_by_name(folder: Path, wrong: str, words: str):
    assert words in json.loads((folder / "refusals.json").read_text())[wrong]
