"""Documents assigned anew in every batch, over stages that differ: each weight is that of one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_hexi.plan import Plan, UnitRates, read_plan
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import job
from tests.megatron.dealt_shares import shares_of
from tests.megatron.option_cases import APART, DEALT, FURTHER_TOKENS, ONE_EACH, PACKED, SELECTIVE
from tests.megatron.option_cases import CASES as OPTIONS
from tests.megatron.planted_shares import DEALT_FAULTS
from tests.megatron.posting import posted
from tests.megatron.test_option_training import logged
from tests.megatron.test_stages_experts import BIAS, Z_LOSS, balanced, balances
from tests.megatron.test_uneven_training import largest_difference
from tests.support.nccl_rules import replay

MODEL = (
    *("--num-layers", "6", *ONE_EACH, "--calculate-per-token-loss", "--eval-iters", "0"),
    *("--disable-bias-linear", "--optimizer", "sgd", "--lr", "0.1", "--min-lr", "0.1"),
)
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-layer-freq", "[0]+[1]*5"),
    *(*balanced("aux_loss", "seq_aux_loss"), *Z_LOSS, *BIAS),
)
SEQUENCE = ("--sequence-parallel",)
HEADER = """\
version: 2
workload: {seq_length: 127, heads: 6, kv_heads: 2, head_dim: 16, layers: 6, experts: 8}
job: {micro_batch_size: 1}
replicas:
"""
#: Two groups before one: two ranks of a unit beside a single one.
STAGES = """\
  stages:
  - layers: [0, 2]  # first
    domains:
    - groups:
      - segments: [[0, 40], [82, 127]]
        members:
        - {ranks: [0], tokens: 70, heads: [0, 4], experts: [0, 5]}
        - {ranks: [1], tokens: 15, heads: [4, 6], experts: [5, 7]}
      - segments: [[40, 82]]
        members: [{ranks: [2], tokens: 42, heads: [0, 6], experts: [7, 8]}]
  - layers: [2, 6]  # last
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [3], tokens: 60, heads: [0, 4], experts: [0, 3]}
        - {ranks: [4], tokens: 67, heads: [4, 6], experts: [3, 8]}
"""
#: Units of two ranks, in a stage and a half as many layers as in the other.
UNITS = """\
  stages:
  - layers: [0, 4]
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0, 1], tokens: 60, heads: [0, 2], experts: [0, 5]}
        - {ranks: [2, 3], tokens: 67, heads: [2, 3], experts: [5, 8]}
  - {layers: [4, 6], domains: [{ranks: [4], experts: [0, 8]}]}
"""
#: Two replicas, one of a single stage.
REPLICAS = f"""\
- micro_batches: 3
{STAGES}- micro_batches: 1
  stages:
  - layers: [0, 6]
    domains:
    - groups:
      - segments: [[0, 20], [100, 127]]
        members: [{{ranks: [5], tokens: 47, heads: [0, 6], experts: [0, 3]}}]
      - segments: [[20, 100]]
        members: [{{ranks: [6], tokens: 80, heads: [0, 6], experts: [3, 8]}}]
"""
WHOLE = f"- micro_batches: 4\n{STAGES}"


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        replicas: of its plan, as they are written in the file.
        model: arguments that the run on one rank has too.
        job: arguments of the run under the plan alone.
        first: what the first stage of two says beside its layers.
        last: what the last one does.
        order: of the ministages.
        idle: a unit too slow for any document; -1: none.
    """

    replicas: str
    model: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    first: str = ""
    last: str = ""
    order: str = ""
    idle: int = -1

    def plan(self, folder: Path) -> Plan:
        text = HEADER + self.replicas.replace("  stages:", f"{self.order}  stages:", 1)
        text = text.replace("  # first", f"\n    {self.first}").replace("  # last", f"\n    {self.last}")
        if "--num-experts" not in self.model:
            text = re.sub(r", experts: (8|\[\d, \d\])", "", text)
        path = folder / "plan.yaml"
        path.write_text(text)
        plan = read_plan(path)
        # With these tokens and heads change from batch to batch, and some shares are empty.
        slow = [1.7 ** (2 * number % 5) for number in range(plan.units)]
        if self.idle >= 0:
            slow[self.idle] *= 1e4
        rows, pairs = tuple(1e-6 * one for one in slow), tuple(5e-8 * one for one in slow)
        return replace(
            plan, rates=UnitRates(rows, pairs, (110 if self.idle < 0 else 200,) * plan.units, attended=0.3)
        )


CASES = {
    # Recomputed layers meet their routers while other micro-batches are in flight.
    "all": Case(
        REPLICAS,
        (*EXPERTS, *FURTHER_TOKENS),
        first="recompute: full",
        last="recompute: selective",
    ),
    "replicas": Case(REPLICAS),
    "experts": Case(WHOLE, EXPERTS, (*SELECTIVE, "core_attn", "moe")),
    "further-tokens": Case(WHOLE, FURTHER_TOKENS),
    # A rank of the last stage.
    "idle": Case(WHOLE, (*EXPERTS, *FURTHER_TOKENS), idle=4),
    "units": Case(f"- micro_batches: 4\n{UNITS}", (*EXPERTS, *FURTHER_TOKENS)),
    "interleaved": Case(
        WHOLE,
        (*EXPERTS, *FURTHER_TOKENS),
        first="ministages: 2",
        last="ministages: 2",
        order="  order: interleaved\n",
    ),
    "ministages": Case(
        WHOLE,
        (*EXPERTS, *FURTHER_TOKENS),
        first="ministages: 2",
        last="ministages: 2\n    offload: [parameters, optimizer, activations]",
    ),
}
#: Iterations of each training: 40 micro-batches.
ITERATIONS = 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "all" else pytest.mark.slow) for name in CASES]
)
def test_training_is_that_of_one_rank(name, forks, references, documents, tmp_path):
    """Losses, norms, the routers' losses, those of both heads; then each weight and each gradient's mean."""
    case = CASES[name]
    words, one = trained_on_one(case, forks, references, documents, tmp_path)
    plan = case.plan(tmp_path)
    log = forks.train(
        tmp_path / "plan",
        ranks=plan.ranks,
        args=[*words, *PACKED, *DEALT, *SEQUENCE, *case.job, "--save", tmp_path / "plan" / "saved"],
        plan=plan,
        entry="tests.megatron.dealt_shares",
    )
    print(f"losses and norms within {largest_difference(log, one):.1e}")
    assert largest_difference(log, one) < 1e-5
    assert balances(log) == pytest.approx(balances(one), rel=1e-5)
    assert bool(balances(log)) == ("--num-experts" in case.model)
    for head in ("mtp_1 loss", "mtp_2 loss"):
        assert logged(log.output, head) == pytest.approx(logged(one.output, head), rel=1e-5)
        assert len(logged(log.output, head)) == (ITERATIONS if "--mtp-num-layers" in case.model else 0)
    found, true = (tensors_of(tmp_path / run / "saved" / f"iter_{ITERATIONS:07}") for run in ("plan", "one"))
    assert found.keys() == true.keys()
    differences = {
        key: float((found[key] - tensor).abs().max() / tensor.abs().max())
        for key, tensor in true.items()
        if tensor.is_floating_point() and tensor.abs().max() > 0
    }
    print(f"{len(differences)} tensors within {max(differences.values()):.1e}")
    assert any("momentum_buffer" in key for key in differences)
    # Gradients are sums of parts that nearly cancel.
    bad = {key: off for key, off in differences.items() if off > (3e-5 if "momentum" in key else 1e-5)}
    assert not bad, bad
    check_shares(shares_of(tmp_path / "plan", plan.ranks), plan, case.idle)


def trained_on_one(case, forks, references, documents, folder):
    """Arguments of both trainings, and the one without a plan, which is saved."""
    model = (*MODEL, *case.model, *documents)
    start, _ = references((*model, *APART), 1)
    steps = ("--train-iters", str(ITERATIONS), "--log-interval", "1", "--save-interval", str(ITERATIONS))
    words = [*job(model), *steps, "--load", start, "--finetune"]
    return words, forks.train(
        folder / "one",
        ranks=1,
        args=[*words, *APART, "--save", folder / "one" / "saved"],
        entry="tests.megatron.document_rolls",
    )


def check_shares(shares, plan, idle):
    """In domains of several units tokens change from batch to batch, somewhere to none, and heads."""
    if idle >= 0:
        assert {tokens for tokens, _ in shares[idle]} == {0}
        return
    several = {
        rank
        for replica in plan.replicas
        for stage in replica.stages
        for domain in stage.domains
        for member in domain.members
        for rank in member.ranks
        if len(domain.members) > 1
    }
    tokens = {rank: [count for count, _ in shares[rank]] for rank in several}
    heads = {rank: {number for _, number in shares[rank]} for rank in several}
    print({rank: (min(counts), max(counts), heads[rank]) for rank, counts in tokens.items()})
    assert all(len(set(counts)) > 1 for counts in tokens.values())
    if len(several) > 4:
        assert any(0 in counts for counts in tokens.values())
        assert any(len(numbers) > 1 for numbers in heads.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "interleaved", "ministages", "idle", "repeated"])
def test_ranks_post_by_nccls_rules(name, forks, documents, tmp_path):
    """Messages of other sizes each time, none from ranks without rows; in a repeated stage sizes go ahead."""
    if name == "repeated":
        option = OPTIONS["documents-dealt-pipeline"]
        plan, ranks = option.plans()["groups"], 6
        words = [*job((*option.model, *documents)), *option.job]
    else:
        case = CASES[name]
        plan = case.plan(tmp_path)
        ranks = plan.ranks
        words = [*job((*MODEL, *case.model, *documents)), *PACKED, *DEALT, *SEQUENCE]
    words += ["--train-iters", "2"]
    forks.train(tmp_path, ranks=ranks, args=words, plan=plan, entry="tests.megatron.posting")
    # Borders have a group for each direction.
    assert replay(posted(tmp_path, ranks), one_queue=name == "repeated") > 0


#: Faults by which a tensor has another number of rows than its messages, and ranks stop.
STOPPED = {"gradients-by-the-newest-shares", "recomputed-by-the-newest-shares"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEALT_FAULTS)
def test_the_comparison_finds_a_fault(fault, forks, references, documents, tmp_path):
    """Ranks stop, or losses and norms are others."""
    case = CASES["all"]
    words, one = trained_on_one(case, forks, references, documents, tmp_path)
    plan = case.plan(tmp_path)
    planted = [*words, *PACKED, *DEALT, *SEQUENCE, *case.job, "--planted", fault]
    try:
        log = forks.train(
            tmp_path, ranks=plan.ranks, args=planted, plan=plan, entry="tests.megatron.planted", timeout=100
        )
    except AssertionError as failure:
        stopped = str(failure)
        print(f"{fault}: {stopped[-600:]}")
    else:
        stopped, difference = "", largest_difference(log, one)
        print(f"{fault}: {difference:.1e}")
        assert difference > 1e-4
    assert bool(stopped) == (fault in STOPPED)
