"""Delta net layers under random plans against Megatron's layer on one rank, in fp64: an entry of `Forks`.

The ranks of a plan are threads of this process, which has the CPU platform and Megatron.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.session import GivenPlan, Session, local_shard
from megatron_hexi.plan import Domain, Group, Mask, Member, Plan, Replica, Stage, Workload
from tests.megatron.planted import DELTA_FAULTS
from tests.support.threads import ThreadRank, run_ranks

LIMIT = 1e-10
BATCH = 2


def _plan(chance: random.Random) -> Plan:
    """Return a plan of one group of one to four members, of which some may have no tokens or no heads."""
    count, heads = chance.randint(1, 4), chance.randint(1, 8)
    length = chance.randint(2, 50)
    tokens = sorted([0, length, *(chance.randint(0, length) for _ in range(count - 1))])
    cuts = sorted([0, heads, *(chance.randint(0, heads) for _ in range(count - 1))])
    members = tuple(
        Member((rank,), tokens[rank + 1] - tokens[rank], (cuts[rank], cuts[rank + 1]))
        for rank in range(count)
    )
    domain = Domain((Group(((0, length),), members),))
    return Plan(Workload(length, heads, heads, 4), (Replica((Stage((domain,)),)),))


def _layer(chance: random.Random) -> Any:
    """Return a layer of Megatron's with few heads of odd sizes, in fp64."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer import TransformerConfig

    from megatron_hexi.megatron.local_specs import DELTA_NET

    keys = chance.randint(1, 3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=1,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        params_dtype=torch.float64,
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * chance.randint(1, 4),
        linear_key_head_dim=chance.randint(1, 5),
        linear_value_head_dim=chance.randint(1, 5),
        linear_conv_kernel_dim=chance.randint(2, 4),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    layer = GatedDeltaNet(
        config, DELTA_NET.submodules, 1, conv_bias=chance.random() < 0.5, pg_collection=groups
    ).double()
    for parameter in layer.parameters():  # also those that begin as ones or zeros
        parameter.data.copy_(torch.randn_like(parameter) / 2)
    return layer


def _packing(length: int, chance: random.Random) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    inside = sorted(chance.sample(range(1, length), min(length - 1, chance.randint(0, 4))))
    ends = torch.tensor([0, *inside, length], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def _results(
    forward: Callable[[Tensor], Tensor], hidden: Tensor, grad: Tensor, weights: list[Tensor]
) -> list[Tensor]:
    """Return the output, and the gradients of the input and of each weight."""
    hidden = hidden.detach().requires_grad_()
    output = forward(hidden)
    return [output.detach(), *torch.autograd.grad(output, [hidden, *weights], grad)]


def _under(plan: Plan, layer: Any, hidden: Tensor, grad: Tensor, packed: Any) -> list[Tensor]:
    """Return what `_results` gives, put together from what each rank of a plan has."""
    from megatron_hexi.megatron import delta_net

    weights = list(layer.parameters())
    documents = None if packed is None else tuple(packed.cu_seqlens_q.diff().tolist())

    def work(rank: ThreadRank) -> tuple[Tensor, int, list[Tensor]]:
        attention = rank.attention(plan)
        schedule = attention.schedules(Mask(documents=documents))
        whole = local_shard(attention.schedules(), 1, hidden.device)
        session = Session(GivenPlan(plan, "plan.yaml", "", "auto", 1), attention, whole)
        shard = local_shard(schedule, 1, hidden.device)
        own = grad[shard.positions].clone()
        own[shard.tokens :] = 0  # padding
        packing = None if packed is None else dataclasses.replace(packed)
        if packing is not None:  # each rank reads ends of its own
            packing.cu_seqlens_q = packed.cu_seqlens_q.clone()
        results = _results(
            lambda rows: delta_net._forward(layer, session, rows, packing)[0],
            hidden[shard.positions],
            own,
            weights,
        )
        return shard.positions, shard.tokens, results

    ranks = run_ranks(len(plan.replicas[0].domain.members), work)
    output, hidden_grad = torch.zeros_like(grad), torch.zeros_like(hidden)
    for positions, tokens, results in ranks:
        output[positions[:tokens]], hidden_grad[positions[:tokens]] = (part[:tokens] for part in results[:2])
    summed = [sum(parts) for parts in zip(*(results[2:] for *_, results in ranks), strict=True)]
    return [output, hidden_grad, *summed]


def _compare(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    plan, layer = _plan(chance), _layer(chance)
    length = plan.workload.seq_length
    packed = _packing(length, chance) if chance.random() < 0.5 else None
    batch = BATCH if packed is None else 1
    hidden, grad = (torch.randn(length, batch, 12, dtype=torch.float64) for _ in range(2))
    alone = _results(
        lambda rows: layer(rows, None, packed_seq_params=packed)[0], hidden, grad, list(layer.parameters())
    )
    shared = _under(plan, layer, hidden, grad, packed)
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    for name, found, expected in zip(names, shared, alone, strict=True):
        far = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
        assert far < LIMIT, f"seed {seed}: {name} differs by {far:.1e} under {plan.replicas}"


def main() -> None:
    """Compare as many random layers and plans as the first argument says; the others name faults."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    for fault in sys.argv[2:]:
        DELTA_FAULTS[fault]()
    # Megatron computes decays and gates in fp32: no part of what is compared.
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        for seed in range(int(sys.argv[1])):
            _compare(seed)
