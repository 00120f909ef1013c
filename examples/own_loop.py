"""A training loop of one's own under a plan: ``torchrun --nproc-per-node 4 own_loop.py own_loop.yaml``."""

import sys
from functools import partial

from megatron_hexi.api import LoopJob, start

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

LENGTH, BATCH, MICRO_BATCH, POSITIONS = 101, 8, 2, "rope"
MODEL = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2}
MODEL |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "calculate_per_token_loss": True}


def build(config: TransformerConfig) -> DistributedDataParallel:
    """Return this rank's part of the model, whose gradients are summed over the ranks."""
    model_parallel_cuda_manual_seed(1)
    words = {"vocab_size": 256, "max_sequence_length": LENGTH, "position_embedding_type": POSITIONS}
    ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
    ends["share_embeddings_and_output_weights"] = False
    model = GPTModel(config, get_gpt_layer_local_spec(), **words, **ends).cuda()
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def micro_batch(iteration: int, number: int) -> dict[str, Tensor]:
    """Return a micro-batch of whole sequences, the same on all ranks; the first tokens have no loss."""
    random = torch.Generator().manual_seed(1000 * iteration + number)
    tokens = torch.randint(0, 256, (MICRO_BATCH, LENGTH + 1), generator=random).cuda()
    mask = (torch.arange(LENGTH) >= 10 * (number % 3)).float().expand(MICRO_BATCH, -1).cuda()
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def loss_of(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of a micro-batch's losses on this rank, the number of its tokens, and both to log."""
    total, count = (losses * mask).sum(), mask.sum()
    return total, count.int(), torch.stack([total.detach(), count])


def forward(session, batches, model):  # type: ignore[no-untyped-def]
    """Run the model on this rank's rows; return its losses, and what sums them up."""
    rows, places = session.shard(next(batches)), session.positions.clamp(min=0).expand(MICRO_BATCH, -1)
    return model(rows["tokens"], places, None, labels=rows["labels"]), partial(loss_of, rows["loss_mask"])


def train(plan, iterations, **changed):  # type: ignore[no-untyped-def]
    """Return the loss of each iteration, the model and the session."""
    config = TransformerConfig(**MODEL | changed)
    session = start(plan, LoopJob(config, LENGTH, MICRO_BATCH, BATCH))
    model = build(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    run = partial(get_forward_backward_func(), forward_step_func=partial(forward, session), model=[model])
    sizes, losses = {"seq_length": LENGTH, "micro_batch_size": MICRO_BATCH}, []
    for iteration in range(iterations):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = (micro_batch(iteration, number) for number in session.micro_batches)
        told = run(data_iterator=batches, num_microbatches=len(session.micro_batches), **sizes)
        optimizer.step()
        losses.append(float(session.reduce(*sum(told, torch.zeros(2, device="cuda")))))
        if dist.get_rank() == 0:
            print(f"iteration {iteration + 1}: loss {losses[-1]:.7f}", flush=True)
    return losses, model, session


if __name__ == "__main__":
    dist.init_process_group()
    train(sys.argv[1], iterations=4)
