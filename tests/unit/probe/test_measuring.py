"""Measuring itself: with a clock and a device that are made up, and a few real kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hexi.cluster import read_cluster
from megatron_hexi.probe import compute, stages
from megatron_hexi.probe.assemble import assemble
from megatron_hexi.probe.compute import (
    WallClock,
    attention,
    clock_for,
    host_copy_gb_s,
    matmul,
    measure_points,
    steady_seconds,
    stream_gb_s,
)
from megatron_hexi.probe.document import Options, Sizes
from megatron_hexi.probe.network import write_cluster
from megatron_hexi.probe.run import partial_path, probe
from megatron_hexi.probe.world import World
from megatron_hexi.runtime.kernels import select_kernel
from tests.support.shell import call_hexi, is_one_error_line

TINY = Sizes(
    rows=(2, 4), tokens=(3, 5), hidden=8, heads=2, head_dim=16, stream_bytes=4096, largest_message=2**16
)


class MadeUpClock:
    """Work tells how long it takes; nothing is waited for. Every third call takes twice as long."""

    def __init__(self):
        self.calls = 0

    def seconds(self, work, calls):
        self.calls += calls
        return work() * (2 if self.calls % 3 == 0 else 1)


def true_rate(size, best):
    """TFLOP/s of the made-up device."""
    return best * size / (size + 200)


@pytest.fixture
def device(monkeypatch):
    """Puts the made-up device in the place of torch's; what was prepared."""
    prepared = []

    def work_of(name, flops, best):
        def prepare(size):
            prepared.append((name, size))
            return lambda: flops(size) / (true_rate(size, best) * 1e12)

        return prepare

    def attention(kernel, sizes, device, dtype, *, causal, backward):
        mask, direction = "causal" if causal else "full", "backward" if backward else "forward"
        return work_of(
            direction,
            lambda tokens: sizes.attention_flops(mask, direction, tokens),
            2.0 - backward - causal / 2,
        )

    monkeypatch.setattr(stages, "clock_for", lambda device: MadeUpClock())
    monkeypatch.setattr(
        compute, "matmul", lambda sizes, device, dtype: work_of("matmul", sizes.matmul_flops, 3.0)
    )
    monkeypatch.setattr(compute, "attention", attention)
    monkeypatch.setattr(compute, "stream_gb_s", lambda *arguments: 45.0)
    monkeypatch.setattr(compute, "host_copy_gb_s", lambda *arguments: 12.0)
    return prepared


def run_probe(out, told=None, **options):
    def tell(what, done, total):
        if told is not None:
            told.append((what, done, total))

    return probe(
        World(0, 1), Options(precision="fp32", **options), partial_path(out), restart=False, progress=tell
    )


def test_the_curves_written_are_those_of_the_device(device, tmp_path):
    out = tmp_path / "one.yaml"
    measured = run_probe(out, budget_s=3600)
    write_cluster(out, *assemble(measured, "one"), measured)
    found = read_cluster(out).nodes[0].device
    for size in (64, 128, 1024, 4096):
        assert found.matmul.rate(size) == pytest.approx(true_rate(size, 3.0), rel=1e-3)
    kernel = found.attention()
    for size in (256, 2048, 16384):
        for curve, best in (
            (kernel.causal.forward, 1.5),
            (kernel.causal.backward, 0.5),
            (kernel.full.forward, 2.0),
            (kernel.full.backward, 1.0),
        ):
            assert curve.rate(size) == pytest.approx(true_rate(size, best), rel=1e-3)


def test_an_interrupted_probe_goes_on_where_it_was(device, tmp_path):
    out = tmp_path / "one.yaml"

    class PullThePlugError(Exception):
        pass

    def tell(what, done, total):
        if what.startswith("attention"):
            raise PullThePlugError

    with pytest.raises(PullThePlugError):
        probe(World(0, 1), Options(precision="fp32"), partial_path(out), restart=False, progress=tell)
    kept = json.loads(partial_path(out).read_text())
    assert kept["done"] == ["memory", "memory bandwidth", "host memory", "matrix products"]
    assert {name for name, _ in device} == {"matmul"}
    device.clear()
    told: list[tuple[str, int, int]] = []
    measured = run_probe(out, told)
    assert {name for name, _ in device} == {"forward", "backward"}
    assert told[0] == ("attention auto", 4, 5)
    assert measured.usable_bytes[0] == kept["usable_bytes"][0]
    assert measured.done == ("memory", "memory bandwidth", "host memory", "matrix products", "attention auto")


def test_the_median_of_samples_counts():
    assert steady_seconds(lambda: 0.001, MadeUpClock(), limit_s=10) == pytest.approx(0.001)


@pytest.mark.parametrize("once", [1e-9, 1e-4, 0.5, 30.0])
def test_a_point_takes_about_as_long_as_it_may(once):
    class Adding:
        spent = 0.0

        def seconds(self, work, calls):
            self.spent += calls * work()
            return work()

    clock = Adding()
    assert steady_seconds(lambda: once, clock, limit_s=2) == once
    assert clock.spent <= 2 + 0.5 + 2 * once + 0.05


def points(sizes, prepare, limit_s=100.0):
    met: list[str] = []
    found = measure_points("work", sizes, float, prepare, MadeUpClock(), limit_s, met.append)
    assert met == [f"work at {size}" for size in sizes]  # the other ranks are never left waiting
    return found


def test_what_would_take_too_long_is_skipped_by_name():
    found = points((1, 10, 100, 1000), lambda size: lambda: float(size), limit_s=40)
    assert found.tflops[:2] == pytest.approx((1e-12, 1e-12))
    assert found.tflops[2:] == (None, None)
    assert found.skipped == "work from 100 on: takes too long"


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        MemoryError(),
    ],
)
def test_what_does_not_fit_is_skipped_by_name(problem):
    def prepare(size):
        if size > 1:
            raise problem
        return lambda: 1.0

    found = points((1, 2, 3), prepare)
    assert found.tflops[1:] == (None, None)
    assert found.skipped == "work from 2 on: does not fit in memory"


def test_other_faults_are_not_hidden():
    def prepare(size):
        raise RuntimeError("a kernel is wrong")

    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        points((1,), prepare)


def test_real_work_runs():
    cpu = torch.device("cpu")
    products: Any = matmul(TINY, cpu, torch.float32)(4)()
    assert [product.shape for product in products] == [(4, 32), (4, 8), (32, 8)]
    kernel = select_kernel("aten-cpu", cpu, torch.float32, 16)
    for causal in (True, False):
        work = attention(kernel, TINY, cpu, torch.float32, causal=causal, backward=True)(5)
        grads: Any = work()
        assert [grad.shape for grad in grads] == [(1, 2, 5, 16)] * 3
    assert stream_gb_s(2**20, cpu, WallClock(), 0.1) > 0
    copied = host_copy_gb_s(2**20, cpu, WallClock(), 0.1)
    assert copied is not None
    assert copied > 0


@pytest.mark.gpu
def test_the_clock_of_a_gpu_waits_for_its_work():
    gpu = torch.device("cuda")
    prepare = matmul(Sizes((), (), 4096, 8, 128, 0, 0), gpu, torch.bfloat16)
    small, large = (steady_seconds(prepare(rows), clock_for(gpu), 1.0) for rows in (1024, 16384))
    assert small > 0
    assert large > 4 * small


@pytest.mark.gpu
def test_a_gpu_is_probed_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = call_hexi(monkeypatch, capsys, ["probe", "-o", "gpu.yaml", "--quick", "--budget", "1"])
    assert code == 0, err
    assert read_cluster("gpu.yaml").nodes[0].device.capability == torch.cuda.get_device_capability()


@pytest.fixture
def hexi(tmp_path, monkeypatch, capsys):
    """Calls ``hexi WORDS…`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: call_hexi(monkeypatch, capsys, words)


def test_the_command_writes_reports_and_cleans_up(device, hexi):
    code, out, err = hexi("probe", "-o", "one.yaml", "--precision", "fp32", "--picture", "one.png")
    assert code == 0
    assert "5 of 5: attention auto" in err
    assert "wrote one.yaml" in err
    assert "aten-cpu causal forward" in out
    assert sorted(path.name for path in Path().iterdir()) == ["one.png", "one.yaml"]


def test_json_is_one_document(device, hexi):
    code, out, _ = hexi("probe", "-o", "one.yaml", "--precision", "fp32", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["stream_gb_s"] == [45.0]
    assert document["host_gb_s"] == [12.0]
    assert "matmul" in document["curves"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kernel", "nosuch"], "kernel nosuch: there is none of that name"),
        (["--kernel", "cudnn"], "kernel cudnn: it runs on CUDA"),
        (["--precision", "int8"], "--precision int8"),
        (["--budget", "0"], "--budget 0"),
        (["--hidden-size", "many"], "'many' is not a whole number"),
        (["-o", "missing/one.yaml"], "the folder missing is not there"),
        (["-o", "."], "is a folder"),
        (["--picture", "one.xyz"], "unknown format"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(device, hexi, words, said):
    if torch.cuda.is_available() and "cudnn" in words:
        pytest.skip("there is a GPU for cuDNN here")
    code, out, err = hexi("probe", "-o", "one.yaml", *words)
    assert (code, out) == (2, "")
    assert is_one_error_line(err), err
    assert said in err
    assert device == []
    assert list(Path().iterdir()) == []


def test_what_is_kept_of_another_probe_is_refused_until_restarted(device, hexi):
    Path("one.yaml.partial.json").write_text("{}")
    code, _, err = hexi("probe", "-o", "one.yaml", "--precision", "fp32")
    assert code == 2
    assert is_one_error_line(err)
    assert "--restart" in err
    assert hexi("probe", "-o", "one.yaml", "--precision", "fp32", "--restart").code == 0
