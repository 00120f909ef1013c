"""Layers that pass a state along the sequence: training by uneven plans is that of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, Workload, unit_ranks
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import References, job, skip_what_is_not_there
from tests.megatron.faulty import assert_fault_is_found
from tests.megatron.forked import Forks
from tests.megatron.option_cases import (
    DEALT,
    DEEPER,
    DISTRIBUTED,
    FULL,
    ONE_EACH,
    OVERLAPPED,
    PACKED,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    balanced,
    unit_rates,
)
from tests.megatron.planted import CONVOLUTION_FAULTS, DELTA_FAULTS, MAMBA_FAULTS
from tests.megatron.test_checkpoints import RESHARDABLE
from tests.megatron.test_option_training import steps
from tests.megatron.test_uneven_training import SEQ_LENGTH, largest_difference

#: Ten heads of two groups: no plan here cuts them evenly, and most cut a group.
MAMBA = (
    *("--hybrid-layer-pattern", "M*M-", "--mamba-num-heads", "10", "--mamba-head-dim", "12"),
    *("--mamba-num-groups", "2", "--mamba-state-dim", "8"),
)
#: Ten value heads of two key heads.
LINEAR = (
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "10"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "12"),
)
DELTA = ("--hybrid-layer-pattern", "G*G-", *LINEAR)
#: Short convolutions, whose layers no group has to itself.
CONVOLUTION = ("--hybrid-layer-pattern", "CC*-", "--linear-conv-kernel-dim", "4")
#: A GPT of which three layers in four are delta nets, as Qwen3-Next's. It has no biases: gradients of keys'
#: biases are nothing but rounding, which the optimizer makes as large as others.
GPT = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"),
    *(*DEEPER, *LINEAR, "--disable-bias-linear"),
)
#: A Mamba layer, attention, a delta net and experts.
WITH_EXPERTS = ("--hybrid-layer-pattern", "M*GE", *MAMBA[2:], *LINEAR)
#: Tokens and heads of attention of each member, by replica.
LAYOUTS = {
    "uneven-heads": (((70, 3), (40, 2), (17, 1)),),
    "no-heads": (((100, 6), (27, 0)),),
    "no-tokens": (((127, 1), (0, 5)),),
    "two-even": (((64, 3), (63, 3)),),
    "equal-replicas": (((90, 4), (37, 2)), ((50, 1), (77, 5))),
    "unequal-replicas": (((90, 4), (37, 2)), ((127, 6),)),
}
HALVES = {"uneven-heads": (((80, 2), (47, 1)),)}


def plan_of(layout: tuple[tuple[tuple[int, int], ...], ...], tensor_parallel: int = 1) -> Plan:
    workload = Workload(SEQ_LENGTH, 6, 2, 16, tensor_parallel=tensor_parallel)
    units, replicas = iter(range(100)), []
    for members in layout:
        heads, placed = 0, []
        for tokens, count in members:
            ranks = unit_ranks(workload, next(units))
            placed.append(Member(ranks, tokens, (heads, heads + count)))
            heads += count
        replicas.append(Replica((Stage((Domain((Group(((0, SEQ_LENGTH),), tuple(placed)),)),)),)))
    return Plan(workload, tuple(replicas))


@dataclass(frozen=True)
class Case:
    """A job under a plan.

    Attributes:
        model: its model.
        layout: a key of `LAYOUTS`.
        job: arguments of the run under the plan alone.
    """

    model: tuple[str, ...]
    layout: str
    job: tuple[str, ...] = ()

    @property
    def tensor_parallel(self) -> int:
        return 2 if TENSOR[0] in self.job else 1

    @property
    def plan(self) -> Plan:
        layouts = LAYOUTS if self.tensor_parallel == 1 else HALVES
        return plan_of(layouts[self.layout], self.tensor_parallel)


CASES = {
    "mamba-uneven-heads": Case(MAMBA, "uneven-heads"),
    "mamba-no-heads": Case(MAMBA, "no-heads"),
    "mamba-no-tokens": Case(MAMBA, "no-tokens"),
    "mamba-two-even": Case(MAMBA, "two-even"),
    "mamba-equal-replicas": Case(MAMBA, "equal-replicas", OVERLAPPED),
    "mamba-unequal-replicas": Case(MAMBA, "unequal-replicas", DISTRIBUTED),
    "mamba-tensor-parallel": Case(MAMBA, "uneven-heads", (*SEQUENCE, *DISTRIBUTED)),
    "mamba-recomputed": Case(MAMBA, "uneven-heads", (*FULL, "uniform")),
    "delta-uneven-heads": Case(DELTA, "uneven-heads"),
    "delta-no-heads": Case(DELTA, "no-heads"),
    "delta-no-tokens": Case(DELTA, "no-tokens"),
    "delta-two-even": Case(DELTA, "two-even"),
    "delta-equal-replicas": Case(DELTA, "equal-replicas", OVERLAPPED),
    "delta-unequal-replicas": Case(DELTA, "unequal-replicas", DISTRIBUTED),
    "delta-tensor-parallel": Case(DELTA, "uneven-heads", (*SEQUENCE, *DISTRIBUTED)),
    "delta-recomputed": Case(DELTA, "uneven-heads", (*FULL, "uniform")),
    "delta-deterministic": Case(DELTA, "uneven-heads", ("--deterministic-mode",)),
    "gpt-uneven-heads": Case(GPT, "uneven-heads"),
    "gpt-unequal-replicas": Case(GPT, "unequal-replicas", DISTRIBUTED),
    "gpt-tensor-parallel": Case(GPT, "uneven-heads", (*SEQUENCE, *DISTRIBUTED)),
    "gpt-pipeline": Case(GPT, "uneven-heads", PIPELINE),
    "gpt-experts": Case((*GPT, *balanced("aux_loss")), "uneven-heads"),
    "hybrid-experts": Case((*WITH_EXPERTS, *balanced("aux_loss")), "uneven-heads"),
    "convolution-unequal-replicas": Case(CONVOLUTION, "unequal-replicas", DISTRIBUTED),
    "convolution-tensor-parallel": Case(CONVOLUTION, "uneven-heads", (*SEQUENCE, *DISTRIBUTED)),
    "convolution-recomputed": Case(CONVOLUTION, "no-heads", (*FULL, "uniform")),
    "convolution-pipeline": Case(CONVOLUTION, "uneven-heads", PIPELINE),
    "mamba-pipeline": Case(MAMBA, "uneven-heads", PIPELINE),
}
FAST = {"mamba-uneven-heads", "mamba-no-heads", "delta-uneven-heads"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_training_is_that_of_one_rank(name: str, forks: Forks, references: References, tmp_path: Path):
    case = CASES[name]
    skip_what_is_not_there(case.model)
    iterations = 4 if name in FAST else 20
    start, reference = references(case.model, iterations)
    words: list[str | Path] = [*job(case.model), *steps(iterations), "--load", start, "--finetune", *case.job]
    ranks = case.plan.units * case.tensor_parallel * (2 if PIPELINE[0] in case.job else 1)
    log = forks.train(tmp_path, ranks=ranks, args=words, plan=case.plan)
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        *(("mamba-uneven-heads", fault) for fault in MAMBA_FAULTS),
        *(("delta-uneven-heads", fault) for fault in DELTA_FAULTS),
        *(("convolution-recomputed", fault) for fault in CONVOLUTION_FAULTS),
    ],
)
def test_a_fault_is_found(model: str, fault: str, forks: Forks, references: References, tmp_path: Path):
    case = CASES[model]
    start, reference = references(case.model, 4)
    words: list[str | Path] = [*job(case.model), *steps(4), "--load", start, "--finetune"]
    assert_fault_is_found(fault, words, case.plan, reference, forks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "delta", "gpt"])
def test_each_gradient_is_that_of_one_rank(model: str, forks: Forks, references: References, tmp_path: Path):
    case = CASES[f"{model}-uneven-heads"]
    start = references(case.model, 4)[0]
    moments = []
    for plan in (None, case.plan):
        folder = tmp_path / str(plan is None)
        words: list[str | Path] = [*job(case.model), *RESHARDABLE, *steps(1), "--load", start, "--finetune"]
        words += ["--save", folder / "saved", "--save-interval", "1"]
        forks.train(folder, ranks=1 if plan is None else plan.units, args=words, plan=plan)
        prefix = "optimizer.state.exp_avg."
        saved = tensors_of(folder / "saved" / "iter_0000001")
        moments.append({key: value for key, value in saved.items() if key.startswith(prefix)})
    alone, shared = moments
    assert shared.keys() == alone.keys()
    assert any("A_log" in key for key in alone)
    far = {key: float((shared[key] - m).abs().max() / m.abs().max()) for key, m in alone.items()}
    # fp32 rounds more in delta nets; in fp64 their gradients agree to 1e-10 (test_delta_net_layer.py).
    assert max(far.values()) < (2e-5 if model == "mamba" else 5e-4), far


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "delta", "gpt", "convolution"])
def test_a_checkpoint_goes_on_under_another_plan(model: str, forks: Forks, tmp_path: Path):
    models = {"mamba": MAMBA, "delta": DELTA, "gpt": GPT, "convolution": CONVOLUTION}
    words: list[str | Path] = [*job(models[model]), *RESHARDABLE, *steps(4)]
    saving: list[str | Path] = ["--save", tmp_path / "weights", "--save-interval", "2"]
    whole = forks.train(tmp_path, ranks=3, args=[*words, *saving], plan=plan_of(LAYOUTS["uneven-heads"]))
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    words += ["--load", tmp_path / "weights", "--no-load-rng"]
    log = forks.train(tmp_path, ranks=2, args=words, plan=plan_of(LAYOUTS["no-heads"]))
    assert log.iterations == [3, 4]
    assert log.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-5)
    # Norms have the names of Transformer Engine's layers, which have them in the projections behind.
    names = FileSystemReader(tmp_path / "weights" / "iter_0000002").read_metadata().state_dict_metadata
    assert not [name for name in names if "_layernorm." in name and "final" not in name]
    projection = "mixer.in_proj" if model in ("mamba", "convolution") else "self_attention.in_proj"
    assert any(name.endswith(f"{projection}.layer_norm_weight") for name in names)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        pytest.param("M-M-", MAMBA[2:], marks=pytest.mark.slow),
        ("G-G-", DELTA[2:]),
        ("C-C-", CONVOLUTION[2:]),
    ],
)
def test_states_begin_anew_in_each_document(
    pattern: str,
    sizes: tuple[str, ...],
    forks: Forks,
    references: References,
    documents: tuple[str, ...],
    tmp_path: Path,
):
    # Megatron's own attention does not take documents; its Mamba layers and delta nets do.
    model = ("--hybrid-layer-pattern", pattern, *sizes, *ONE_EACH, *documents, *PACKED)
    start, reference = references(model, 4)
    words: list[str | Path] = [*job(model), *steps(4), "--load", start, "--finetune"]
    log = forks.train(tmp_path, ranks=3, args=words, plan=plan_of(LAYOUTS["uneven-heads"]))
    assert largest_difference(log, reference) < 1e-5
    continued = [word for word in words if word not in PACKED]
    other = forks.train(tmp_path, ranks=3, args=continued, plan=plan_of(LAYOUTS["uneven-heads"]))
    assert largest_difference(other, reference) > 1e-4


def test_convolutions_begin_anew_in_documents_that_are_dealt(
    forks: Forks, references: References, documents: tuple[str, ...], tmp_path: Path
):
    model = ("--hybrid-layer-pattern", "C-C-", *CONVOLUTION[2:], *ONE_EACH, *documents, *PACKED)
    start, reference = references(model, 4)
    plan = plan_of(LAYOUTS["uneven-heads"])
    words: list[str | Path] = [*job(model), *steps(4), "--load", start, "--finetune", *DEALT]
    log = forks.train(tmp_path, ranks=3, args=words, plan=replace(plan, rates=unit_rates(plan.units)))
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (MAMBA, "--hybrid-layer-pattern has layers M"),
        (GPT, "--experimental-attention-variant has layers G"),
    ],
)
def test_a_domain_of_several_groups_is_refused_by_name(
    model: tuple[str, ...], named: str, forks: Forks, tmp_path: Path
):
    plan = plan_of(LAYOUTS["two-even"])
    halves = tuple(
        Group(segments, (replace(member, tokens=sum(b - a for a, b in segments), heads=(0, 6)),))
        for segments, member in zip(
            (((0, 30), (97, 127)), ((30, 97),)), plan.replicas[0].domain.groups[0].members, strict=True
        )
    )
    plan = Plan(plan.workload, (Replica((Stage((Domain(halves),)),)),))
    with pytest.raises(AssertionError, match=f"{named}, whose state does not pass between groups yet"):
        forks.train(tmp_path, ranks=2, args=[*job(model), *steps(1)], plan=plan)
