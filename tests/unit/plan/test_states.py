"""Plans of models whose layers pass a state along the sequence are checked."""

from argparse import Namespace

import pytest

from megatron_hexi.errors import PlanError
from megatron_hexi.options.plan_job import check_workload
from megatron_hexi.plan import read_plan
from megatron_hexi.plan.heads import divided_domain

_GROUPS = """\
groups:
      - {segments: [[0, 20], [44, 64]], members: [{ranks: [RANK], tokens: 40, heads: [0, 4]}]}
      - {segments: [[20, 44]], members: [{ranks: [NEXT], tokens: 24, heads: [0, 4]}]}
"""
_DIVIDED = _GROUPS.replace("RANK", "2").replace("NEXT", "3")
STAGES = f"""\
version: 2
workload: {{seq_length: 64, heads: 4, kv_heads: 4, head_dim: 16, layers: 6}}
replicas:
- stages:
  - {{layers: [0, 3], domains: [{{ranks: [0, 1]}}]}}
  - layers: [3, 6]
    domains:
    - {_DIVIDED}"""
MINISTAGES = STAGES.replace("layers: [0, 3],", "layers: [0, 3], ministages: 3,").replace(
    "layers: [3, 6]\n", "layers: [3, 6]\n    ministages: 3\n"
)
REPEATED = f"""\
version: 2
workload: {{seq_length: 64, heads: 4, kv_heads: 4, head_dim: 16}}
replicas:
- stages:
  - domains:
    - {_GROUPS.replace("RANK", "0").replace("NEXT", "1")}"""


def plan_of(text, folder):
    path = folder / "plan.yaml"
    path.write_text(text)
    return read_plan(path)


@pytest.mark.parametrize(
    ("text", "states", "found"),
    [
        (STAGES, "110000", None),
        (STAGES, "110100", ("replicas[0].stages[1]", 2)),
        (MINISTAGES, "101010", None),  # its layers are 1, 3 and 5
        (MINISTAGES, "010000", ("replicas[0].stages[1]", 2)),
        (REPEATED, "000000", None),
        (REPEATED, "000001", ("replicas[0]", 2)),
    ],
)
def test_a_domain_may_have_groups_where_its_stage_has_no_state(text, states, found, tmp_path):
    assert divided_domain(plan_of(text, tmp_path), [state == "1" for state in states]) == found


ARGS = {
    "hexi_plan": "plan.yaml",
    "multi_latent_attention": False,
    "group_query_attention": False,
    "seq_length": 64,
    "encoder_seq_length": None,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "hidden_size": 64,
    "num_layers": 6,
    "num_experts": None,
    "tensor_model_parallel_size": 1,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 1, 1, 0, 0, 0],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_attention_freq": 4}, r"replicas\[0\].stages\[1\] has a domain of 2 groups"),
        (
            {"linear_num_value_heads": 5},
            "--linear-num-key-heads 2 does not divide --linear-num-value-heads 5",
        ),
        (
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            "plan.yaml: 2, the ranks of a unit, does not divide --linear-num-key-heads 3",
        ),
        ({"hybrid_layer_pattern": "M*-*-*", "mamba_num_groups": 1}, "does not divide --mamba-num-groups 1"),
        ({"hybrid_layer_pattern": "M*-*-*", "mamba_num_heads": 5}, "does not divide --mamba-num-heads 5"),
        (
            {"hybrid_layer_pattern": "M*-*-*", "mamba_num_heads": None, "mamba_head_dim": 128},
            "does not divide --mamba-num-heads 1",
        ),
        (
            {"hybrid_layer_pattern": "M*-*-*-*"},
            "workload.layers is 6, but the job has --hybrid-layer-pattern of length 8",
        ),
        (
            {"hybrid_layer_pattern": "M*-*-M"},
            "--hybrid-layer-pattern has layers M, whose state does not pass",
        ),
    ],
)
def test_what_a_state_lacks_is_said(changes, said, tmp_path):
    plan = plan_of(STAGES, tmp_path)
    check_workload(Namespace(**ARGS), plan)
    with pytest.raises(PlanError, match=said):
        check_workload(Namespace(**ARGS | changes), plan)
