"""Published figures against the cost model: conversions by hand, errors within what the page says."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from benchmarks.published import __main__ as command
from benchmarks.published.convert import mask_tflops, tokens_per_s
from benchmarks.published.layouts import (
    equal_cluster,
    equal_plan,
    job,
    mixed_cluster,
    mixed_plan,
    training_plan,
)
from benchmarks.published.orders import orders
from benchmarks.published.page import write_page
from benchmarks.published.predict import Comparison, compare, misfit
from benchmarks.published.profiles import KERNEL, profiled_device
from benchmarks.published.summary import by_sort, errors
from benchmarks.published.tables import is_profiled, left_out, model, profile, tables
from benchmarks.published.torch_ring import ring_seconds
from megatron_hexi.cost import CostModel, model_flops
from megatron_hexi.cost.compute import device_speeds, logits_times, own_block_times, token_times
from megatron_hexi.models import Job
from megatron_hexi.plan import validate_plan

TABLES = {table.name: table for table in tables()}
#: Of the page: the most that a row of each table is off, time and memory.
BOUNDS = {
    "nemo-h100": (0.06, None),
    "nemo-b200": (0.23, None),
    "bridge": (0.12, None),
    "internevo": (0.17, None),
    "torchtitan-8b": (0.48, 0.08),
    "torchtitan-405b": (0.14, 0.17),
    "magi": (0.25, None),
    "sailor-mixed": (0.26, None),
    "sailor-gh200": (0.23, 0.19),
    "bigscience": (0.47, None),
    "mpt-80": (0.29, None),
    "mpt-40": (0.25, None),
    "torchtitan-tp8": (0.49, None),
    "internevo-more": (0.23, None),
    "dlperf": (0.24, None),
    "dgxc": (0.45, None),
    "nemo-b200-more": (0.41, None),
    "automodel-dense": (0.09, None),
    "bridge-experts": (1.48, None),
    "bridge-gpt-oss": (1.0, None),
    "bridge-dispatchers": (0.29, None),
    "zoo-experts": (0.32, None),
    "zoo-long": (0.16, None),
    "automodel-experts": (0.28, None),
    "zorse": (0.26, None),
}


@pytest.fixture(scope="module")
def results():
    return {name: compare(table) for name, table in TABLES.items()}


def test_flops_by_hand():
    # Llama-2-7B: 4 x 4096^2 + 3 x 4096 x 11008 weights a layer, 32 layers, 32000 words.
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    attention = 4096 * 32 * 4096
    llama = model("llama2-7b")
    assert model_flops(llama, 4096, "full") == 6 * weights + 12 * attention
    assert model_flops(llama, 4096, "half") == 6 * weights + 6 * attention
    # NeMo's 768 TFLOP/s, and Bridge's own pair of figures: 14451 tokens/s and 744 TFLOP/s.
    assert tokens_per_s(768, llama, 4096, "full") == pytest.approx(16665, abs=1)
    assert tokens_per_s(744, model("llama3-8b"), 8192, "half") == pytest.approx(14451, rel=0.001)
    # Both conventions say the same tokens/s of what took the same time.
    full, half = (model_flops(llama, 2**20, way) for way in ("full", "half"))
    assert tokens_per_s(full / 1e12, llama, 2**20, "full") == pytest.approx(
        tokens_per_s(half / 1e12, llama, 2**20, "half")
    )


def test_attention_alone_by_hand():
    # 64 heads of 128 over 2 GPUs, 1024 tokens, a second.
    area = 1024 * 1024 / 2
    one = mask_tflops(model("attention"), 1024, 2, 1.0, backward=False)
    assert one == pytest.approx(4 * 64 * 128 * area / 2 / 1e12)
    assert mask_tflops(model("attention"), 1024, 2, 1.0, backward=True) == pytest.approx(2.5 * one)


@pytest.mark.parametrize("name", ["GH-96", "RTX-3090", "Titan-RTX", "RTX-2080"])
def test_a_profiled_gpu_takes_what_was_profiled(name):
    known, opt = profile(name), model("opt-350m")
    unit = max(known.units)
    device = profiled_device(name, known, opt, unit, opt.head_dim)
    profiled = Job(opt, 2048, known.samples, known.samples, precision="fp32", kernel=KERNEL)
    speeds, rows = device_speeds(device, profiled), np.array([2048.0 * known.samples])
    token, heads = (
        token_times(speeds, profiled, rows),
        own_block_times(speeds, profiled, np.array([2048.0]), True),
    )
    for way in range(2):
        assert float(token[way][0] + 16 * heads[way][0]) == pytest.approx(known.layer[way])
    assert float(logits_times(speeds, profiled, rows).backward[0]) == pytest.approx(known.head)
    # A ring over the unit: each GPU sends all but one part, twice.
    size = 2048 * known.samples * 1024 * 4
    ring = 2 * (unit - 1) / unit * size / (device.link.bandwidth_gb_s * 1e9)
    assert ring == pytest.approx(known.units[unit] - known.embedding)


@pytest.mark.parametrize(
    "name",
    # InternEvo's tables are longer, and of the same kind as others.
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("internevo") else ()) for name in TABLES],
)
def test_plans_are_those_of_the_rows(name):
    for row in TABLES[name].rows:
        wanted = job(row)
        if row.expert or (row.layers and not is_profiled(row)):
            plan, cluster = training_plan(row, wanted), equal_cluster(row)
            split = [stage.layers or (0, 0) for stage in plan.replicas[0].stages]
            assert sum(stop - start for start, stop in split) == wanted.model.layers
            assert len(split) == row.depth
            ranks = plan.ranks
        elif row.layers:
            plan, cluster = mixed_plan(row, wanted), mixed_cluster(row)
            first = [stage.layers or (0, 0) for stage in plan.replicas[0].stages]
            assert [stop - start for start, stop in first] == list(row.layers)
            assert sum(row.layers) == wanted.model.layers
            ranks = plan.ranks
        else:
            plan, cluster = equal_plan(row, wanted), equal_cluster(row)
            ranks = plan.ranks * row.pipeline
        validate_plan(plan)
        assert ranks == len(cluster.ranks)


def test_what_blocks_and_what_hides_is_counted(results):
    # Sends of 16.8 MB at 0.115 GB/s, there and back, in every micro-batch of the slower stage.
    mixed = TABLES["sailor-mixed"]
    row = mixed.rows[0]
    (found,) = [one for one in results["sailor-mixed"] if one.row == "R/T, TP2"]
    timing = CostModel(job(row), mixed_cluster(row)).timing(mixed_plan(row, job(row)))
    send = 4096 * 1024 * 4 / 0.115e9
    slower = max(phases.total for phases in timing.pipelines[0].stage_phases)
    assert found.predicted == pytest.approx(128 * (slower + 2 * send), rel=0.02)


def test_torch_waits_for_keys_of_all_heads():
    # Llama-3.1-405B at 64K over two ranks on two nodes: 32K rows of 16 heads.
    (row,) = [row for row in TABLES["torchtitan-405b"].rows if row.parallel == 2]
    elements = 32 * 1024 * 16 * 128
    gathered, summed = 4 * elements / 45e9, 10 * elements / (2400e9 * 0.9)
    forward = gathered + summed
    backward = gathered + 2 * (8 * elements / 45e9 + 3 * summed)
    # Eight micro-batches through eight stages of 16 layers, whose forward passes run twice.
    assert ring_seconds(row, job(row), equal_cluster(row)) == pytest.approx(
        15 * 16 * (2 * forward + backward)
    )


def test_errors_are_within_what_the_page_says(results):
    assert results.keys() == BOUNDS.keys()
    for name, rows in results.items():
        for what, bound in zip(("time", "memory"), BOUNDS[name], strict=True):
            own = [row for row in rows if row.what == what]
            assert bool(own) == (bound is not None)
            if bound is not None:
                assert errors(own).worst <= bound, (name, what)
    for what in ("time", "memory"):
        found = errors([row for rows in results.values() for row in rows if row.what == what])
        assert found.median <= 0.11


def test_rows_that_ran_fit_but_for_three():
    rows = [(table, row) for table in TABLES.values() if table.kind == "training" for row in table.rows]
    found = [
        one for one in itertools.starmap(misfit, rows) if one is not None and one.needed > 1.05 * one.usable
    ]
    over = [(one.table, round(one.needed / one.usable, 1)) for one in found]
    assert over == [("dgxc", 1.1), ("dgxc", 1.1), ("bridge-gpt-oss", 1.3)]


def test_errors_by_hand():
    rows = [Comparison("t", "r", "time", "s", 10.0, predicted) for predicted in (11.0, 8.0, 10.5)]
    assert tuple(errors(rows)) == pytest.approx((3, 0.1, 0.2, 0.2, -0.05 / 3))


def test_classes_by_hand():
    """The ninth of ten dense rows is the 90th percentile; parts of a training belong to no class."""
    rows = [
        Comparison("t", "r", "time", "s", 10.0, 10.0 + number, sort=sort, year=2020 + number)
        for sort in ("dense", "experts across nodes", "")
        for number in range(1, 11)
    ]
    found = dict(by_sort(rows))
    assert list(found) == ["dense", "dense, software since 2024", "experts across nodes"]
    assert found["dense"] == found["experts across nodes"]
    assert found["dense"].rows == 10
    assert found["dense"].high == pytest.approx(0.9)
    assert found["dense, software since 2024"].rows == 7


def test_a_token_goes_once_to_a_node_where_the_row_says_so(results):
    """One shape with EP 16 on two nodes: the plan names its nodes, and fewer bytes pass between them."""
    direct, once = (row for row in TABLES["bridge-dispatchers"].rows if row.note in ("alltoall", "HybridEP"))
    for row, nodes in ((direct, None), (once, (tuple(range(8)), tuple(range(8, 16))))):
        (stage,) = training_plan(row, job(row)).replicas[0].stages
        assert stage.expert_nodes == nodes
    labels = {one.row: one for one in results["bridge-dispatchers"]}
    faster, slower = (labels[f"qwen3-30b-a3b, dgx-h100, EP16, {name}"] for name in ("HybridEP", "alltoall"))
    assert faster.predicted > 1.3 * slower.predicted


def test_hidden_messages_leave_the_time():
    (row,) = [row for row in TABLES["zoo-experts"].rows if row.note == "DeepEP, 1F1B overlap"]
    shown = dataclasses.replace(row, hidden_experts=0.0)
    table = dataclasses.replace(TABLES["zoo-experts"], rows=(row, shown))
    hidden, plain = (1 / one.predicted for one in compare(table))
    seconds = CostModel(job(row), equal_cluster(row)).timing(training_plan(row, job(row))).phases.all_to_all
    per_token = seconds / (row.batch * row.context * 1024 / row.ranks)
    assert plain - hidden == pytest.approx(row.hidden_experts * per_token)


def test_orders_by_hand():
    published = {"a": (10.0,), "b": (12.0,), "c": (8.0, 10.0)}  # a layout that was measured twice: 9
    predicted = {"a": 5.0, "b": 4.0, "c": 6.0}
    rows = [
        Comparison("t", layout, "time", "s", seconds, predicted[layout], "one job")
        for layout, repeats in published.items()
        for seconds in repeats
    ]
    alone = [Comparison("t", layout, "time", "s", 1.0, 1.0, "another job") for layout in "de"]
    (found,) = orders([*rows, *alone])
    assert (found.layouts, found.first) == (3, "b")
    assert found.correlation == pytest.approx(-1)
    assert found.regret == pytest.approx(12 / 9 - 1)
    # The same in tokens/s, where more is faster.
    rates = [
        Comparison("t", row.row, "time", "tokens/s", 1 / row.published, 1 / row.predicted, row.job)
        for row in rows
        if row.row != "c"
    ]
    third = Comparison("t", "c", "time", "tokens/s", 1 / 9, 1 / 6, "one job")
    (again,) = orders([*rates, third])
    assert again.first == "b"
    assert again.correlation == pytest.approx(-1)
    assert again.regret == pytest.approx(found.regret)


def test_rows_that_are_not_predicted_have_their_reasons():
    assert sum(rows.rows for rows in left_out()) == 20
    assert all(rows.reason and rows.url.startswith("https://") for rows in left_out())


def test_the_command_prints_every_row(capsys, tmp_path, results):
    assert command.main(["--json", "--picture", str(tmp_path / "errors.png")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == sum(len(own) for own in results.values())
    assert rows[0]["error"] == pytest.approx(rows[0]["predicted"] / rows[0]["published"] - 1)
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert all(row["row"] in shown for row in rows)


def test_the_page_is_current(tmp_path, results):
    write_page(results, tmp_path)
    made, kept = ((folder / "published.md").read_text() for folder in (tmp_path, command.PAGE))
    assert made == kept, "stale; run: python -m benchmarks.published --page"
