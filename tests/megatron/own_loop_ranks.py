"""examples/own_loop.py on its ranks, in several jobs one after the other; the results are saved."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.modules["megatron.training"] = None  # type: ignore[assignment]  # a loop of one's own has Megatron-Core alone
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import own_loop  # type: ignore[import-not-found]  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron_hexi import api  # noqa: E402
from megatron_hexi.errors import PlanError  # noqa: E402
from megatron_hexi.megatron.loop_session import LoopSession  # noqa: E402

ITERATIONS = 3


def by_size(weight: torch.Tensor) -> torch.Tensor:
    """Initialise a weight by nothing but its size: Megatron's own seeds differ by stage."""
    random = torch.Generator().manual_seed(weight.numel())
    with torch.no_grad():
        return weight.copy_(torch.randn(weight.shape, generator=random) * 0.05)


METHODS: Any = {"init_method": by_size, "output_layer_init_method": by_size}


def save(out: Path, name: str, losses: list[float], model: Any) -> None:
    module = model.module
    weights = {}
    for key, weight in module.named_parameters():
        parts = key.split(".")
        if parts[:2] == ["decoder", "layers"]:  # a stage counts its own layers from 0
            parts[2] = str(module.decoder.layers[int(parts[2])].layer_number - 1)
        weights[".".join(parts)] = weight.detach().clone()
    torch.save((losses, weights), out / f"{name}-{dist.get_rank()}.pt")


def run(out: Path, name: str, plan: str, iterations: int = ITERATIONS, **changed: Any) -> LoopSession:
    losses, model, session = own_loop.train(plan, iterations, **METHODS, **changed)
    save(out, name, losses, model)
    return session


def end() -> None:
    mpu.destroy_model_parallel()
    api.patches.remove()


def reference(out: Path, name: str) -> None:
    """Train on one rank by Megatron-Core alone: whole sequences, its own attention."""
    mpu.initialize_model_parallel()
    model = own_loop.build(own_loop.TransformerConfig(**own_loop.MODEL | METHODS))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    places = torch.arange(own_loop.LENGTH).expand(own_loop.MICRO_BATCH, -1)

    def forward(batches: Any, model: Any) -> Any:
        rows = next(batches)
        losses = model(rows["tokens"], places, None, labels=rows["labels"])
        return losses, partial(own_loop.loss_of, rows["loss_mask"])

    losses = []
    for iteration in range(ITERATIONS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = schedules.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=(own_loop.micro_batch(iteration, number) for number in range(4)),
            model=[model],
            num_microbatches=4,
            seq_length=own_loop.LENGTH,
            micro_batch_size=own_loop.MICRO_BATCH,
        )
        optimizer.step()
        losses.append(float(torch.stack(told).sum(0)[0] / torch.stack(told).sum(0)[1]))
    save(out, name, losses, model)
    mpu.destroy_model_parallel()


def check_rows(session: LoopSession) -> None:
    """Check rows, values in the sequence's order and their gradients, on every rank."""
    length, places = own_loop.LENGTH, session.positions
    random = torch.Generator().manual_seed(0)
    whole, weight = (torch.randn(2, length, 3, generator=random) for _ in range(2))
    rows = session.shard({"values": whole})
    own = places >= 0
    assert torch.equal(rows["values"][:, own], whole[:, places[own]])
    assert rows["loss_mask"].tolist() == [own.float().tolist()] * 2
    values = rows["values"].requires_grad_()
    together = session.unshard(values)
    assert torch.equal(together, whole)
    (together * weight).sum().backward()
    ranks = dist.get_world_size(session._session.attention.domain_group)
    expected = torch.where(own[:, None], ranks * weight[:, places.clamp(min=0)], 0.0)
    torch.testing.assert_close(values.grad, expected)
    total = torch.tensor(float(dist.get_rank()), requires_grad=True)
    mean = session.reduce(total, torch.tensor(2))
    mean.backward()
    assert float(mean) == sum(range(4)) / 8
    assert float(total.grad) == 1 / 8  # type: ignore[arg-type]
    for wrong in ({"tokens": whole[:, 1:]}, {"tokens": whole, "cu_seqlens": torch.tensor([0, length])}):
        try:
            session.shard(wrong)
        except PlanError:
            continue
        raise AssertionError(f"{list(wrong)} was taken")


def check_documents(plan: str) -> None:
    """Check rows of a sequence of documents, and their values in the sequence's order."""
    config = own_loop.TransformerConfig(**own_loop.MODEL)
    documents = {"dataloader_inter_document_masking": True}
    session = api.start(plan, api.LoopJob(config, own_loop.LENGTH, 1, 4, documents))
    ends = torch.tensor([0, 30, 64, own_loop.LENGTH], dtype=torch.int32)
    places = torch.arange(own_loop.LENGTH)[None] + 1
    rows = session.shard({"places": places, "cu_seqlens": ends})
    assert torch.equal(rows["loss_mask"], (rows["places"] > 0).float())
    assert torch.equal(session.unshard(rows["places"], ends), places)
    end()


def under_plans(out: Path, replicas: str, stages: str) -> None:
    check_documents(replicas)
    check_rows(run(out, "replicas", replicas, cp_comm_type="a2a"))  # which the plan replaces
    end()
    right = {name: getattr(LoopSession, name) for name in ("shard", "reduce", "positions")}
    LoopSession.shard = lambda self, batch: right["shard"](  # type: ignore[method-assign]
        self, {key: one.roll(-1, 1) for key, one in batch.items()}
    )
    run(out, "shifted rows", replicas, 1)
    end()
    LoopSession.shard = right["shard"]  # type: ignore[method-assign]

    def without_counts(self: LoopSession, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return right["reduce"](self, total / count, torch.tensor(1))

    LoopSession.reduce = without_counts  # type: ignore[method-assign]
    run(out, "no counts", replicas, 1)
    end()
    LoopSession.reduce = right["reduce"]  # type: ignore[method-assign]
    own_loop.POSITIONS = "learned_absolute"
    pipeline: Any = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    run(out, "stages", stages, **pipeline)
    end()
    LoopSession.positions = property(  # type: ignore[method-assign, assignment]
        lambda self: (right["positions"].fget(self) + 1).clamp(max=own_loop.LENGTH - 1)
    )
    run(out, "shifted places", stages, 1, **pipeline)


if __name__ == "__main__":
    dist.init_process_group()
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        reference(folder, "rope")
        own_loop.POSITIONS = "learned_absolute"
        reference(folder, "learned")
    else:
        under_plans(folder, sys.argv[2], sys.argv[3])
