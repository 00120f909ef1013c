"""What cannot be re-planned is refused by name."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.options.parser import parse_words
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, Workload
from megatron_hexi.replan.arguments import check_replanning
from megatron_hexi.shell.words import Word

CLUSTER = str(Path(__file__).parents[3] / "scripts/testbed/four-equal.yaml")
WORKLOAD = Workload(8, 2, 2, 4, layers=2)


def plan(*members: Member) -> Plan:
    stage = Stage((Domain((Group(((0, 8),), members),)),))
    return Plan(WORKLOAD, (Replica((stage,)),))


TWO = plan(Member((0,), 4, (0, 1)), Member((1,), 4, (1, 2)))
ONE = plan(Member((0,), 8, (0, 2)))
STAGES = replace(TWO, replicas=(Replica((replace(TWO.replicas[0].stages[0], layers=(0, 2)),)),))


ALONE = replace(
    STAGES,
    replicas=(
        Replica(
            tuple(
                Stage((Domain((Group(((0, 8),), (Member((rank,), 8, (0, 2)),)),)),), layers=(rank, rank + 1))
                for rank in range(2)
            )
        ),
    ),
)


def arguments(**given: object) -> Namespace:
    """Megatron's own for a dense decoder of two layers, with re-planning."""
    words = [Word(word, 0) for word in ("--num-layers", "2", "--disable-bias-linear")]
    defaults = {"hexi_plan": "plan.yaml", "hexi_replan_interval": 10, "hexi_replan_threshold": 0.03}
    args = parse_words(words, "the job").args
    return Namespace(**(vars(args) | defaults | {"hexi_cluster": CLUSTER} | given))


def test_what_can_be_replanned_passes():
    check_replanning(arguments(), TWO)
    check_replanning(arguments(), STAGES)
    check_replanning(arguments(), replace(ALONE, replicas=ALONE.replicas * 2))  # of which each takes a share
    check_replanning(arguments(window_size=(4, 0), window_attn_skip_freq=2, softmax_type="learnable"), TWO)
    check_replanning(arguments(multi_latent_attention=True, qk_layernorm=True), TWO)
    check_replanning(arguments(num_experts=4, mtp_num_layers=1), STAGES)
    check_replanning(arguments(hybrid_layer_pattern="*-"), TWO)
    check_replanning(arguments(fp8="hybrid"), TWO)
    check_replanning(arguments(hexi_replan_interval=None, hexi_cluster=None), TWO)


@pytest.mark.parametrize(
    ("given", "of", "message"),
    [
        ({"hexi_replan_interval": None}, TWO, "--hexi-cluster .*is for re-planning"),
        ({"hexi_replan_interval": 1}, TWO, "--hexi-replan-interval 1: .*give 2 or more"),
        ({"hexi_replan_threshold": 1.5}, TWO, "--hexi-replan-threshold 1.5: is a part"),
        ({"hexi_replan_threshold": float("nan")}, TWO, "--hexi-replan-threshold nan: is a part"),
        ({"hexi_cluster": None}, TWO, "give --hexi-cluster cluster.yaml too"),
        ({"hexi_cluster": "/none"}, TWO, "--hexi-cluster /none: no such file"),
        ({}, ONE, "has no second unit"),
        ({}, ALONE, "has no second unit"),
        (
            {"multi_latent_attention": True, "qk_layernorm": False},
            TWO,
            "--multi-latent-attention without --qk-layernorm is not supported",
        ),
        (
            {"hybrid_layer_pattern": "MG", "mamba_num_heads": 2},
            TWO,
            "--hybrid-layer-pattern has layers M and G",
        ),
        ({"cuda_graph_impl": "local"}, TWO, "--cuda-graph-impl"),
    ],
)
def test_what_cannot_is_refused_by_name(given, of, message):
    with pytest.raises(HexiError, match=message):
        check_replanning(arguments(**given), of)
