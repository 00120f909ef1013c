"""Plans with stages, units and samples of their own: as files."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Exchange, Replica, Stage, dump_plan, plan_digest, read_plan, write_plan
from megatron_hexi.report.tables import plan_report
from megatron_hexi.report.unit_summary import unit_summaries

#: Two depths, units of one and two ranks, domains by tokens and by samples, uneven state.
MIXED = """\
version: 2
workload:
  seq_length: 64
  heads: 8
  kv_heads: 4
  head_dim: 16
  causal: true
  layers: 6
  padded_vocabulary: 512
replicas:
- stages:
  - domains:
    - groups:
      - name: ''
        segments: [[0, 20], [44, 64]]
        members:
        - {ranks: [0, 1], tokens: 25, heads: [0, 3], state: 3, patches: 2}
        - {ranks: [2, 3], tokens: 15, heads: [3, 4], patches: 0}
      - name: ''
        segments: [[20, 44]]
        members:
        - {ranks: [4, 5], tokens: 24, heads: [0, 4], patches: 5}
    layers: [0, 1]
    recompute: full
    exchange: {window: 2}
  - domains:
    - {ranks: [6], samples: 3}
    - {ranks: [7, 8], state: 2, precision: bf16, samples: 1}
    layers: [1, 6]
    recompute: 2
  micro_batches: 3
- stages:
  - domains:
    - {ranks: [9], patches: 1}
    layers: [0, 6]
  micro_batches: 1
exchange: {window: 1}
job:
  micro_batch_size: 4
  global_batch_size: 16
  precision: fp8
  fp8_recipe: tensorwise
  distributed_optimizer: true
"""

THREE_STAGES = """\
version: 2
workload: {seq_length: 64, heads: 8, kv_heads: 4, head_dim: 16, layers: 9}
replicas:
- stages:
  - {layers: [0, 3], ministages: 2, domains: [{ranks: [0]}]}
  - {layers: [3, 5], ministages: 2, domains: [{ranks: [1]}]}
  - {layers: [5, 9], ministages: 2, domains: [{ranks: [2]}]}
"""

REPEATED = """\
version: 2
workload: {seq_length: 64, heads: 8, kv_heads: 4, head_dim: 16}
replicas:
- stages: [{ministages: 2, domains: [{ranks: [0]}]}]
"""


def test_what_is_read_is_written_byte_for_byte(read):
    assert dump_plan(read(MIXED)) == MIXED


def test_stages_units_and_samples_are_read(read):
    plan = read(MIXED)
    first, second = plan.replicas[0].stages
    assert [member.ranks for member in plan.members] == [(0, 1), (2, 3), (4, 5), (6,), (7, 8), (9,)]
    assert (plan.ranks, plan.units, plan.is_repeated) == (10, 6, False)
    assert plan.workload.tensor_parallel == 0
    assert plan.workload_of(first.domain).local_heads == 4
    assert (first.exchange, second.exchange) == (Exchange(2), None)
    assert [domain.samples for domain in second.domains] == [3, 1]
    (whole,) = second.domains[1].members
    assert (whole.tokens, whole.heads, whole.state, whole.precision) == (64, (0, 4), 2, "bf16")
    assert second.domains[1].groups[0].segments == ((0, 64),)


@pytest.mark.parametrize(
    ("line", "says"),
    [("version: 1\n", ":1: version is 1"), ("version: two\n", "'two'"), ("", "version is missing")],
)
def test_another_version_is_refused_with_the_line_to_write(line, says, read):
    with pytest.raises(PlanError) as refused:
        read(MIXED.replace("version: 2\n", line, 1))
    assert says in str(refused.value)
    assert "write version: 2" in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    layers: [0, 6]\n", "", ":33: replicas[1].stages[0].layers is missing"),
        (
            "layers: [1, 6]",
            "layers: [2, 6]",
            ":29: replicas[0].stages[1].layers begins at layer 2; begin at 1",
        ),
        ("layers: [0, 6]", "layers: [0, 0]", "stages[0].layers ends at layer 0; end it after 0, and at 6"),
        ("layers: [1, 6]", "layers: [1, 1]", "stages[1].layers ends at layer 1; end it after 1, and at 6"),
        ("layers: [1, 6]", "layers: [1, 7]", "ends at layer 7; end it after 1, and at 6 at most"),
        (
            "layers: [0, 6]",
            "layers: [0, 5]",
            ":35: replicas[1].stages[0].layers ends at layer 5; end it at 6",
        ),
        ("samples: 3", "samples: 2", ":27: replicas[0].stages[1].domains take 3 samples of each micro-batch"),
        (", samples: 1}", "}", ":28: replicas[0].stages[1].domains[1].samples is missing"),
        ("ranks: [9]", "ranks: [8]", ":34: replicas[1].stages[0].domains[0].ranks has 8, which is given"),
        ("ranks: [9]", "ranks: [10]", "have 10 ranks numbered up to 10, and rank 9 is missing"),
        ("ranks: [7, 8]", "ranks: [7, 8, 9]", ":28: replicas[0].stages[1].domains[1].ranks has 3 ranks"),
        ("recompute: 2", "recompute: some", "stages[1].recompute"),
        ("recompute: 2", "recompute: 6", ":30: replicas[0].stages[1].recompute is 6, the stage has 5 layers"),
        (
            "micro_batches: 1",
            "micro_batches: 2",
            "global_batch_size is 16, the replicas take 5 micro-batches",
        ),
        (
            "  fp8_recipe: tensorwise",
            "  pipeline_parallel: 2",
            "pipeline_parallel is 2, but stages state layers",
        ),
        ("  layers: 6\n", "", ":3: workload.layers is missing, stages state layers"),
        (
            "recompute: full",
            "ministages: 2",
            ":24: replicas[0].stages[0].ministages is 2, the stage has 1 layer;",
        ),
        (
            "recompute: full",
            "ministages: 1",
            "replicas[0].stages[1].ministages is missing, in the replica's first stage 1; give all stages",
        ),
        (
            "    recompute: 2",
            "    ministages: 2",
            ":30: replicas[0].stages[1].ministages is 2, in the replica's first stage missing",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    ministages: 7",
            ":36: replicas[1].stages[0].ministages is 7, the stage has 6 layers; give every",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    ministages: 2\n    recompute: 3",
            ":37: replicas[1].stages[0].recompute is 3, and all layers of a ministage are computed again",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    ministages: 0",
            ":36: replicas[1].stages[0].ministages",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    offload: []",
            ":36: replicas[1].stages[0].offload",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    offload: [gradients]",
            ":36: replicas[1].stages[0].offload[0]",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    offload: [optimizer, optimizer]",
            ":36: replicas[1].stages[0].offload[1] is optimizer, which stands there already; name each once",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    offload: [optimizer, parameters]",
            ":36: replicas[1].stages[0].offload[1] is parameters, of a stage that runs whole: all of its",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    ministages: 2\n    offload: [activations, parameters]",
            ":37: replicas[1].stages[0].offload[1] is parameters, and the optimizer's state of the same",
        ),
        (
            "layers: [0, 6]",
            "layers: [0, 6]\n    offload: [activations]",
            ":36: replicas[1].stages[0].offload[0] is activations, of a stage that runs whole: no rows wait",
        ),
        ("{ranks: [6], samples: 3}", "{ranks: [6], samples: 3, groups: []}", "ranks is not a known field"),
        (
            "precision: fp8\n",
            "precision: bf16\n",
            "job.fp8_recipe is tensorwise, of a job that does not say precision: fp8; add it, or leave",
        ),
        (
            "precision: fp8\n  fp8_recipe: tensorwise\n",
            "precision: fp16\n",
            ":28: replicas[0].stages[1].domains[1].ranks have precision: bf16, which units state in a job in",
        ),
        (
            "patches: 0",
            "state: 2",
            ":18: replicas[0].stages[0].domains[0].groups[0].members[1].patches is missing, other units",
        ),
        ("patches: 1", "patches: 0", ":34: replicas[1].stages[0].domains[0] leaves the images to no unit"),
        (
            "samples: 3",
            "samples: 3, patches: 4",
            ":27: replicas[0].stages[1].domains[0].patches is 4, in a stage that encodes no images; leave",
        ),
        ("fp8_recipe: tensorwise", "fp8_recipe: nvfp4", ":42: job.fp8_recipe = 'nvfp4' is not known"),
    ],
)
def test_a_broken_rule_of_stages_names_its_place_in_the_file(old, new, says, read):
    assert MIXED.count(old) == 1
    with pytest.raises(PlanError) as refused:
        read(MIXED.replace(old, new))
    assert says in str(refused.value)


def test_ministages_deal_the_layers_in_turns(read):
    (stages,) = read(THREE_STAGES).replicas
    assert [stages.ministage_layers(number) for number in range(3)] == [
        ((0, 2), (5, 6)),
        ((2, 3), (6, 7)),
        ((3, 5), (7, 9)),
    ]


@given(sizes=st.lists(st.integers(3, 9), min_size=1, max_size=4), count=st.integers(1, 3))
def test_ministages_hold_every_layer_once(sizes, count):
    cuts = list(itertools.accumulate(sizes, initial=0))
    stages = tuple(Stage((), layers=layers, ministages=count) for layers in itertools.pairwise(cuts))
    replica = Replica(stages)
    dealt = [replica.ministage_layers(number) for number in range(len(sizes))]
    held = [[layer for start, stop in own for layer in range(start, stop)] for own in dealt]
    assert [len(own) for own in held] == sizes
    assert sorted(itertools.chain(*held)) == list(range(sum(sizes)))
    for own in dealt:
        lengths = [stop - start for start, stop in own]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
    # In the order of the model: stage after stage, round after round.
    order = [own[turn] for turn in range(count) for own in dealt]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(order))


DEALT = """\
version: 2
workload: {seq_length: 64, heads: 8, kv_heads: 4, head_dim: 16, layers: 9}
replicas:
- micro_batches: 4
  stages:
  - {layers: [0, 3], ministages: 2, domains: [{ranks: [0], micro_batches: 3}, {ranks: [1], micro_batches: 1}]}
  - {layers: [3, 9], ministages: 2, domains: [{ranks: [2]}]}
"""


def test_domains_that_take_whole_micro_batches_are_read_written_and_shown(read, tmp_path: Path):
    plan = read(DEALT)
    write_plan(plan, tmp_path / "again.yaml")
    assert read_plan(tmp_path / "again.yaml") == plan
    mesh = Mesh(plan, 2, sequence_parallel=False)
    assert [unit.micro_batches for unit in mesh.units] == [(0, 2, 3), (1,), None]
    assert [unit.samples for unit in mesh.units] == [(0, 2)] * 3
    assert [mesh.taking_domain(0, 0, number) for number in range(4)] == [0, 1, 0, 0]
    assert mesh.taking_domain(0, 1, 0) is None
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_report(plan, unit_summaries(plan)))
    assert "micro-batches" in console.export_text()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "ranks: [1], micro_batches: 1",
            "ranks: [1], samples: 1",
            "domains[1].samples is 1, in a stage whose",
        ),
        ("ranks: [1], micro_batches: 1", "ranks: [1]", "domains[1].micro_batches is missing; say how many"),
        (
            "micro_batches: 3",
            "micro_batches: 2",
            "domains take 3 micro-batches of an iteration, the replica ta",
        ),
        (
            "- micro_batches: 4\n  ",
            "- ",
            "domains take 4 micro-batches of an iteration, the replica does not",
        ),
        ("ministages: 2, ", "", "domains[0].micro_batches is 3, in a stage that runs 1F1B, where all take"),
    ],
)
def test_a_broken_rule_of_the_deal_names_its_place(old, new, says, read):
    with pytest.raises(PlanError) as refused:
        read(DEALT.replace(old, new))
    assert says in str(refused.value)


OFFLOADING = THREE_STAGES.replace(
    "ministages: 2, domains: [{ranks: [1]}]",
    "ministages: 2, offload: [parameters, optimizer, activations], domains: [{ranks: [1]}]",
)


def test_what_is_offloaded_is_read_written_and_shown(read, tmp_path: Path):
    plan = read(OFFLOADING)
    assert [stage.offload for stage in plan.replicas[0].stages] == [
        None,
        ("parameters", "optimizer", "activations"),
        None,
    ]
    write_plan(plan, tmp_path / "again.yaml")
    assert read_plan(tmp_path / "again.yaml") == plan
    assert plan_digest(plan) != plan_digest(read(THREE_STAGES))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_report(plan, unit_summaries(plan)))
    assert "parameters, optimizer, activations" in console.export_text()


def test_a_stage_that_the_job_repeats_offloads_nothing(read):
    text = REPEATED.replace("ministages: 2", "offload: [optimizer]")
    with pytest.raises(PlanError, match=r"offload is \['optimizer'\], in a stage that the job's pipeline"):
        read(text)


def test_a_stage_that_the_job_repeats_has_no_ministages(read):
    with pytest.raises(
        PlanError, match=r"stages\[0\].ministages is 2, in a stage that the job's pipeline repeats"
    ):
        read(REPEATED)
