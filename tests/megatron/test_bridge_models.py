"""Kinds of models in Megatron Bridge's own loop under uneven plans, beside Bridge alone on one rank.

The reference has Megatron's own layers in fp32, whatever the job has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.megatron import bridge_emulated, test_bridge_training
from tests.megatron.launch import launch

pytestmark = pytest.mark.skipif(
    not bridge_emulated.is_available(), reason="Megatron Bridge is not unpacked; see scripts/bootstrap.sh"
)

WORKLOADS = {
    "dense": "kv_heads: 2, head_dim: 16",
    "experts": "kv_heads: 2, head_dim: 16, experts: 4",
    "qwen3": "kv_heads: 2, head_dim: 16",
    "latent": "kv_heads: 4, head_dim: 16, value_dim: 16",
    "vision": "kv_heads: 2, head_dim: 16",
    "vision3": "kv_heads: 2, head_dim: 16",
    "vision3e": "kv_heads: 2, head_dim: 16, experts: 4",
}
HEADER = "version: 2\nworkload: {{seq_length: {1}, heads: 4, {0}, layers: 4, hidden_size: 64}}\nreplicas:\n"
PLANS = {
    "groups": test_bridge_training.PLANS["one-stage"],
    "stages": test_bridge_training.PLANS["stages"],
    "replicas": test_bridge_training.PLANS["replicas"],
    "pipeline": test_bridge_training.PLANS["pipeline"],
    "dealt": """\
- micro_batches: 3
  stages:
  - domains:
    - groups:
      - segments: [[0, 40], [70, 101]]
        members:
        - {ranks: [0], tokens: 50, heads: [0, 3], patches: 2}
        - {ranks: [1], tokens: 21, heads: [3, 4], patches: 0}
      - segments: [[40, 70]]
        members:
        - {ranks: [2], tokens: 30, heads: [0, 4], patches: 1}
- micro_batches: 1
  stages:
  - domains: [{ranks: [3], patches: 1}]
""",
    "dealt-stages": """\
- micro_batches: 3
  stages:
  - layers: [0, 2]
    domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0], tokens: 71, heads: [0, 3], patches: 2}
        - {ranks: [1], tokens: 30, heads: [3, 4], patches: 1}
  - {layers: [2, 4], domains: [{ranks: [3]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [2], patches: 1}]}
""",
    "samples": """\
- micro_batches: 2
  stages:
  - layers: [0, 3]
    domains:
    - samples: 1
      groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0], tokens: 71, heads: [0, 3], patches: 1}
        - {ranks: [1], tokens: 30, heads: [3, 4], patches: 2}
    - {ranks: [2], samples: 1}
  - {layers: [3, 4], domains: [{ranks: [3]}]}
job: {micro_batch_size: 2}
""",
    "first-units": """\
- micro_batches: 3
  stages:
  - {layers: [0, 3], domains: [{ranks: [0, 1]}]}
  - {layers: [3, 4], domains: [{ranks: [2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
""",
    "units": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0, 1], tokens: 63, heads: [0, 1]}
        - {ranks: [2, 3], tokens: 38, heads: [1, 2]}
""",
    # Bridge wants lengths that tensor-parallel ranks divide where images are scattered.
    "even-units": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 102]]
        members:
        - {ranks: [0, 1], tokens: 63, heads: [0, 1], patches: 1}
        - {ranks: [2, 3], tokens: 39, heads: [1, 2], patches: 2}
""",
    # Of two sequences each.
    "packed": """\
- micro_batches: 1
  stages:
  - domains:
    - groups:
      - segments: [[0, 80], [140, 202]]
        members:
        - {ranks: [0], tokens: 100, heads: [0, 3], patches: 2}
        - {ranks: [1], tokens: 42, heads: [3, 4], patches: 0}
      - segments: [[80, 140]]
        members:
        - {ranks: [2], tokens: 60, heads: [0, 4], patches: 1}
- micro_batches: 1
  stages:
  - domains: [{ranks: [3], patches: 1}]
""",
    "packed-units": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 70], [160, 204]]
        members:
        - {ranks: [0, 1], tokens: 114, heads: [0, 2], patches: 1}
      - segments: [[70, 160]]
        members:
        - {ranks: [2, 3], tokens: 90, heads: [0, 2], patches: 2}
""",
    "unit-stages": """\
- micro_batches: 3
  stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - {layers: [1, 4], domains: [{ranks: [2, 3]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [1]}]}
""",
}
#: All that a stage can offload waits in host memory.
PLANS["turns"] = (
    PLANS["dealt-stages"]
    .replace("[0, 2]", "[0, 2]\n    ministages: 2\n    offload: [parameters, optimizer, activations]")
    .replace("[2, 4]", "[2, 4], ministages: 2")
)
# Weights of one stage alone, which ranks gather for each ministage; first layers that add features.
PLANS["sole-turns"] = """\
- stages:
  - layers: [0, 4]
    ministages: [2, 1, 1]
    domains:
    - groups:
      - segments: [[0, 40], [70, 101]]
        members:
        - {ranks: [0], tokens: 50, heads: [0, 3]}
        - {ranks: [1], tokens: 21, heads: [3, 4]}
      - segments: [[40, 70]]
        members:
        - {ranks: [2], tokens: 20, heads: [0, 3]}
        - {ranks: [3], tokens: 10, heads: [3, 4]}
"""
PLANS["unit-turns"] = """\
- micro_batches: 3
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0, 1]}]}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
"""
for name, like in (("packed-turns", "turns"), ("packed-stages", "dealt-stages")):
    halved = PLANS[like].replace("101", "202").replace("tokens: 71", "tokens: 172")
    PLANS[name] = halved.replace("micro_batches: 3", "micro_batches: 1")
PLANS["interleaved"] = (
    PLANS["turns"]
    .replace("    offload: [parameters, optimizer, activations]\n", "")
    .replace("- micro_batches: 3\n", "- micro_batches: 3\n  order: interleaved\n")
)
PLANS["apart"] = PLANS["dealt-stages"].replace("[0, 2]", "[0, 0]").replace("[2, 4]", "[0, 4]")
PLANS["last-units"] = PLANS["unit-stages"]
#: Tokens of a plan's sequence, where not 101.
LENGTHS = dict.fromkeys(("even-units", "first-units", "last-units", "unit-turns"), 102)
LENGTHS |= {"packed": 202, "packed-units": 204, "packed-turns": 202, "packed-stages": 202}
SCRIPT = Path(__file__).parent / "bridge_models.py"
#: The job of the default suite, and those that are trained on request.
JOBS = ["experts-te", "vision", "vision-on", "vision-back", "vision-stages"]
FURTHER = [
    *("dense-chunks", "vision-chunks"),
    *("experts", "latent", "qwen3", "dense-bf16", "latent-te", "qwen3-units", "qwen3-groups"),
    *("vision-pipeline", "vision-units", "vision3", "vision3-pipeline", "vision3e"),
    *("vision-stages-there", "vision-encoder-stages", "vision-decoder-stages", "vision-lora-stages"),
    *("vision-first-units", "vision-last-units", "vision-samples", "vision3-samples", "vision-apart"),
    *("vision-stages-on", "vision-stages-back", "vision3-stages", "vision3e-stages"),
    *("vision3-units", "vision3-heads", "vision-packed", "vision3-packed"),
    *("vision-there", "vision3-on", "vision3e-back"),
    *("vision-turns", "vision-sole-turns", "vision3-sole-turns", "vision-unit-turns"),
    *("vision-interleaved", "vision-turns-back", "vision-turns-there"),
    *("vision-encoder-turns", "vision-decoder-turns", "vision-lora-turns"),
    *("vision-packed-turns", "vision-packed-stages"),
    *("vision-videos", "vision-videos-packed", "vision3-videos", "vision3-again"),
    *("vision-encoder", "vision-decoder", "vision-lora", "vision3-lora", "vision-halved"),
]
#: Norms of Transformer Engine's and of Megatron's own layers that have two names.
NORMS = (
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("attention.q_layernorm.", "attention.linear_q_up_proj.layer_norm_"),
    ("kv_layernorm.", "linear_kv_up_proj.layer_norm_"),
)
Weights = dict[tuple[str, tuple[tuple[int, int], ...]], Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a job's results; jobs of the default suite are trained together, others one by one."""
    folder = tmp_path_factory.mktemp("models")
    for plan, replicas in PLANS.items():
        for model, workload in WORKLOADS.items():
            header = HEADER.format(workload, LENGTHS.get(plan, 101))
            (folder / f"{plan}-{model}.yaml").write_text(header + replicas)
    done: set[str] = set()

    def train(job: str) -> Path:
        if job in done:
            return folder
        jobs = JOBS if job in JOBS else [job]
        saved = GO_ON.get(job)
        if saved is not None and saved not in jobs:
            train(saved)
        compared = {reference(one) for one in done}
        alone = [one for one in jobs if reference(one) not in compared]
        if alone:
            run(folder, 1, alone)
        run(folder, 4, jobs)
        done.update(jobs)
        return folder

    return train


def run(folder: Path, ranks: int, jobs: list[str]) -> None:
    args: list[str | Path] = [SCRIPT, folder, *jobs]
    ended = launch(folder, ranks=ranks, args=args, entry="tests.megatron.bridge_models_run", timeout=240)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]


def read(folder: Path, name: str) -> tuple[list[float], Weights]:
    """Return a job's losses, and all parts of its weights; those that several ranks hold are equal."""
    losses: list[float] = []
    weights: Weights = {}
    for path in sorted(folder.glob(f"{name}-[0-9].pt")):
        own_losses, own_weights = torch.load(path)
        losses = losses or own_losses
        for (key, cell), weight in own_weights.items():
            part = functools.reduce(lambda name, pair: name.replace(*pair), NORMS, key), cell
            assert part not in weights or torch.equal(weight, weights[part]), f"{name}: {part} differs"
            weights[part] = weight
    return losses, weights


def whole(weights: Weights) -> dict[str, Tensor]:
    """Return the weights of one rank by name, put together."""
    shapes: dict[str, list[int]] = {}
    for name, cell in weights:
        known = shapes.setdefault(name, [0] * len(cell))
        shapes[name] = [max(size, stop) for size, (_, stop) in zip(known, cell, strict=True)]
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for (name, cell), weight in weights.items():
        found[name][slices(cell)] = weight.float()
    assert not any(weight.isnan().any() for weight in found.values())
    return found


def slices(cell: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*axis) for axis in cell)


#: Jobs with a reference of their own; that of others is named as their first word.
ALONE = ("vision-encoder", "vision-decoder", "vision-lora", "vision3-lora", "vision-videos", "vision3-videos")
#: Jobs that go on from a checkpoint of five iterations, and the job that saved it; ``None``: the reference.
GO_ON = {
    "vision-on": "vision",
    "vision-back": "vision",
    "vision-there": None,
    "vision3-on": "vision3",
    "vision3e-back": "vision3e",
    "vision3e-stages": None,
    "vision-stages-on": "vision-first-units",
    "vision-stages-back": "vision-first-units",
    "vision-stages-there": None,
    "vision-turns-back": "vision-turns",
    "vision-turns-there": None,
}


def reference(job: str) -> str:
    """Return the name of the model that a job is compared with, as one rank trains it."""
    return next((one for one in ALONE if job.startswith(one)), job.partition("-")[0])


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=pytest.mark.slow if job in FURTHER else [])
        for job in JOBS + FURTHER
        if job not in ("dense-bf16", "vision-halved")
    ],
)
def test_losses_and_weights_are_those_of_one_rank(job: str, trained: Callable[[str], Path]):
    folder = trained(job)
    losses, weights = read(folder, job)
    true_losses, true_weights = read(folder, f"{reference(job)}-None-alone")
    expected = true_losses[5:10] if job in GO_ON else true_losses
    assert len(true_losses) == 10 + 1  # one of validation
    assert losses == pytest.approx(expected, rel=1e-5)
    true = whole(true_weights)
    assert whole(weights).keys() == true.keys()  # no element is missing
    for (name, cell), weight in weights.items():
        # Adam divides by the size of gradients, however small.
        torch.testing.assert_close(weight, true[name][slices(cell)], rtol=0, atol=5e-5)


@pytest.mark.slow
def test_halved_gradients_of_one_replicas_encoder_show(trained: Callable[[str], Path]):
    folder = trained("vision-halved")
    found, true = (whole(read(folder, job)[1]) for job in ("vision-halved", "vision-None-alone"))
    assert (
        found["visual.patch_embed.proj.weight"] - true["visual.patch_embed.proj.weight"]
    ).abs().max() > 5e-5


@pytest.mark.slow
def test_bf16_is_as_far_from_fp32_as_on_one_rank(trained: Callable[[str], Path]):
    folder = trained("dense-bf16")
    losses, weights = read(folder, "dense-bf16")
    alone_losses, alone_weights = read(folder, "dense-bf16_mixed-alone")
    true_losses, true_weights = read(folder, "dense-None-alone")
    assert far(losses, true_losses) <= 2 * far(alone_losses, true_losses)
    own, alone, true = whole(weights), whole(alone_weights), whole(true_weights)
    assert own.keys() == true.keys()
    for name, weight in true.items():
        assert (own[name] - weight).norm() <= 2 * (alone[name] - weight).norm()


def far(losses: list[float], true: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, true, strict=True))
