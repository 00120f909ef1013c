"""What a run tells: who was busy, who waited for what. One rank is slow by a known time, and it must show."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron_hexi.plan import Plan, plan_digest, proportional_plan, read_plan, write_plan
from megatron_hexi.record import Record, read_record
from megatron_hexi.report.run_summary import describe_run
from tests.megatron.forked import Forks
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE, WORKLOAD

#: What the slow rank sleeps in an iteration, in equal parts in every MLP.
SLEPT_S = 0.8
#: 2 layers, 2 micro-batches.
MLP_CALLS = 4
PIPELINED = ("--pipeline-model-parallel-size", "2")
#: With many micro-batches, messages between stages are waited for when the schedule must.
INTERLEAVED = (
    *("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--micro-batch-size", "1", "--global-batch-size", "8"),
)
FOUR_LAYERS = dataclasses.replace(WORKLOAD, layers=4)


def train_with_slow_rank(
    forks: Forks, folder: Path, ranks: int, slow: int, plan: Plan, *args: str, calls: int = MLP_CALLS
) -> tuple[Record, str]:
    """The record, and what the last rank printed."""
    write_plan(plan, folder / "plan.yaml")
    words = [
        str(slow),
        str(SLEPT_S / calls),
        "scalars.jsonl",
        *MODEL,
        "--train-iters",
        "5",
        "--log-interval",
        "1",
    ]
    words += ["--hexi-plan", "plan.yaml", "--hexi-record", "record.jsonl", "--hexi-platform", "cpu", *args]
    outcome = forks.launch(folder, ranks=ranks, args=words, entry="tests.megatron.slow_rank")
    assert outcome.succeeded, outcome.why()
    return read_record(folder / "record.jsonl"), outcome.output[-1]


@pytest.fixture(scope="module")
def attention_run(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record, str]:
    """A training whose third rank is slow: its folder, its record, and what the last rank printed."""
    folder = tmp_path_factory.mktemp("attention")
    return folder, *train_with_slow_rank(forks, folder, 4, 2, THREE_AND_ONE)


def test_a_slow_rank_is_busy_and_those_that_share_its_attention_wait_for_it(attention_run):
    _, record, _ = attention_run
    check_slow_rank(record, "attention", 4, 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "plan", "args", "calls"),
    [
        pytest.param(
            *("gradients", 2, proportional_plan(WORKLOAD, [[[1]], [[1]]]), (), MLP_CALLS // 2),
            marks=pytest.mark.slow,
        ),
        (
            "gradients",
            2,
            proportional_plan(WORKLOAD, [[[1]], [[1]]]),
            ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            MLP_CALLS // 2,
        ),
        ("pipeline", 2, proportional_plan(WORKLOAD, [[[1]]]), PIPELINED, MLP_CALLS // 2),
        pytest.param(
            "pipeline",
            2,
            proportional_plan(FOUR_LAYERS, [[[1]]]),
            (*PIPELINED, *INTERLEAVED),
            4 * MLP_CALLS,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gradients", "gradients-overlapped", "pipeline", "pipeline-interleaved"],
)
def test_a_slow_rank_is_busy_and_the_others_wait_for_it(forks, tmp_path, kind, ranks, plan, args, calls):
    record, _ = train_with_slow_rank(forks, tmp_path, ranks, 1, plan, *args, calls=calls)
    check_slow_rank(record, kind, ranks, 1)


def check_slow_rank(record: Record, kind: str, ranks: int, slow: int) -> None:
    """The slow rank is busy for as long as it sleeps, and the others wait as long in operations of a kind."""
    (leg,) = record.legs
    times = [interval.ranks for interval in leg.intervals]
    assert len(times) == 5
    # The least of five iterations: a machine that does other things too makes any of them longer.
    busy = [min(column) for column in zip(*(one.busy_s for one in times), strict=True)]
    waited = list(zip(*(getattr(one, f"{kind}_s") for one in times), strict=True))
    assert busy[slow] >= SLEPT_S
    for rank in {*range(ranks)} - {slow}:
        # The work itself is as long as the machine lets it be, on either rank.
        spare = SLEPT_S * 0.3 + busy[rank] / 2
        assert abs(busy[slow] - busy[rank] - SLEPT_S) < spare, f"busier than rank {rank}"
        assert min(waited[slow]) < spare
        assert max(waited[rank]) > SLEPT_S * 0.7, f"rank {rank} waits"


def test_a_run_tells_its_log_its_writers_and_its_record_the_same(attention_run):
    folder, record, output = attention_run
    (leg,) = record.legs
    assert leg.start.digest == plan_digest(read_plan(folder / "plan.yaml"))
    assert (leg.start.platform, len(leg.start.devices), leg.start.precision) == ("cpu", 4, "fp32")
    assert (leg.start.micro_batch_size, leg.start.global_batch_size) == (2, 4)
    lines = [line for line in output.splitlines() if " iteration " in line and "elapsed time" in line]
    losses = [float(found) for line in lines for found in re.findall(r"lm loss: (\S+)", line)]
    losses.pop(1)  # Megatron's second line is the mean of the first two iterations
    told = [loss for one in leg.intervals for loss in one.losses]
    assert [told[0], *told[2:]] == pytest.approx(losses, rel=1e-6)
    written: dict[int, dict[str, float]] = {}
    for line in (folder / "scalars.jsonl").read_text().splitlines():
        name, value, iteration = json.loads(line)
        written.setdefault(iteration, {})[name] = value
    assert sorted(written) == [1, 2, 3, 4, 5]
    for line, interval in zip(lines, leg.intervals, strict=True):
        ranks, (iteration,) = interval.ranks, interval.iterations
        assert f" iteration {iteration:8d}/" in line
        assert interval.tokens == 4 * 127
        assert f" tokens/s: {interval.tokens_per_s:.0f} |" in line
        assert f" idle share: {ranks.idle_share:.1%} |" in line
        found = re.search(r"busy by rank \(ms\): (.*) \|", line)
        assert found
        busy = [float(part.split(": ")[1]) / 1e3 for part in found[1].split(", ")]
        assert busy == pytest.approx(ranks.busy_s, abs=1e-4)
        names = ["hexi/tokens-per-second", "hexi/idle-share"]
        expected = [interval.tokens_per_s, ranks.idle_share]
        for rank in range(4):
            names += [f"hexi-busy-seconds/rank-{rank}", f"hexi-idle-share/rank-{rank}"]
            expected += [ranks.busy_s[rank], ranks.idle_shares[rank]]
        for prefix in ("", "wandb "):
            values = [written[iteration][prefix + name] for name in names]
            assert values == pytest.approx(expected, abs=1e-5, rel=1e-3)
        # All of a step is either busy or waiting, and the longest step is the iteration.
        for step, work, wait in zip(ranks.step_s, ranks.busy_s, ranks.waited_s, strict=True):
            assert step == pytest.approx(work + wait)
        assert interval.seconds[0] == max(ranks.step_s)
        assert min(ranks.peak_bytes) > 2**26
    run = describe_run(record, THREE_AND_ONE, None)
    assert run.iterations == (1, 2, 3, 4, 5)
    assert max(run.ranks, key=lambda rank: rank.busy_s).rank == 2
    assert min(run.ranks, key=lambda rank: rank.idle_share).rank == 2


def test_a_job_that_goes_on_appends(forks, tmp_path):
    """Three iterations, the last one not in a checkpoint, then from the second to the fifth."""
    words = [*MODEL, "--log-interval", "2", "--hexi-platform", "cpu", "--save", tmp_path / "weights"]
    words += ["--save-interval", "2", "--hexi-record", tmp_path / "record.jsonl"]
    forks.train(
        tmp_path, ranks=4, args=[*words, "--train-iters", "4", "--exit-interval", "3"], plan=THREE_AND_ONE
    )
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    forks.train(
        tmp_path,
        ranks=4,
        args=[*words, "--train-iters", "6", "--load", tmp_path / "weights", "--override-opt_param-scheduler"],
        plan=THREE_AND_ONE,
    )
    record = read_record(tmp_path / "record.jsonl")
    told = [[interval.iterations for interval in leg.intervals] for leg in record.legs]
    assert told == [[(1,), (2,)], [(3,), (4,), (5, 6)]]
    assert len(describe_run(record, THREE_AND_ONE, None).losses) == 6


@pytest.mark.parametrize(
    ("record", "with_plan", "said"),
    [
        (
            "record.jsonl",
            False,
            "--hexi-record record.jsonl: records a run under a plan; add --hexi-plan",
        ),
        (".", True, ".: is a folder; give the name of a file in it"),
        ("plan.yaml", True, "plan.yaml: begins with"),
    ],
)
def test_a_record_that_cannot_be_is_refused_before_anything_is_allocated(
    forks, tmp_path, record, with_plan, said
):
    plan = proportional_plan(WORKLOAD, [[[1]]])
    write_plan(plan, tmp_path / "plan.yaml")
    before = (tmp_path / "plan.yaml").read_text()
    words = [*MODEL, "--train-iters", "1", "--hexi-platform", "cpu", "--hexi-record", record]
    outcome = forks.launch(
        tmp_path, ranks=1, args=[*words, *(["--hexi-plan", "plan.yaml"] if with_plan else [])], timeout=250
    )
    assert outcome.codes == [2]
    assert said in outcome.output[0]
    assert "Traceback" not in outcome.output[0]
    assert (tmp_path / "plan.yaml").read_text() == before


def test_without_a_plan_nothing_is_measured_or_told(forks, tmp_path):
    words = [*MODEL, "--train-iters", "2", "--log-interval", "1", "--hexi-platform", "cpu"]
    outcome = forks.launch(tmp_path, ranks=1, args=words)
    assert outcome.succeeded, outcome.why()
    assert "lm loss" in outcome.output[0]
    assert "idle share" not in outcome.output[0]
