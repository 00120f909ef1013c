"""The platform: chosen by name; the CPU's replacements work and can all be taken off."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hexi.errors import PlatformError, user_errors
from megatron_hexi.platform import Platform, adjust_cpu_arguments, requested_platform, select_platform


@pytest.fixture
def cpu() -> Iterator[Platform]:
    platform = select_platform("cpu")
    platform.install()
    yield platform
    platform.remove()


def as_megatron(expression: str) -> Any:
    """The value of an expression, as a module of Megatron would see it."""
    return eval(expression, {"__name__": "megatron.core.somewhere", "torch": torch})


def snapshot() -> dict[str, dict[str, Any]]:
    holders = {
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.random": torch.cuda.random,
        "torch.Tensor": torch.Tensor,
    }
    return {name: dict(vars(holder)) for name, holder in holders.items()}


def test_removing_restores_pytorch_exactly() -> None:
    before = snapshot()
    platform = select_platform("cpu")
    platform.install()
    assert torch.cuda.current_device() == 0
    assert vars(torch.cuda)["Stream"] is not before["torch.cuda"]["Stream"]
    platform.remove()
    after = snapshot()
    for holder, attributes in before.items():
        assert attributes.keys() == after[holder].keys()
        assert [name for name in attributes if attributes[name] is not after[holder][name]] == []


def test_it_can_be_installed_again(cpu: Platform) -> None:
    cpu.remove()
    cpu.install()
    assert torch.zeros(1, device="cuda").device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(2, device=device),
        lambda device: torch.tensor([1.0], device=device),
        lambda device: torch.zeros_like(torch.ones(2), device=device),
        lambda device: torch.ones(2).to(device),
        lambda device: torch.ones(2).to(device=device, dtype=torch.bfloat16),
        lambda device: torch.ones(2).new_zeros(3, device=device),
        lambda device: torch.nn.Linear(2, 2, device=device).weight,
        lambda device: torch.nn.Linear(2, 2).to(device).weight,
        lambda device: torch.nn.Linear(2, 2).cuda(0).weight,
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)])
def test_cuda_means_the_cpu(cpu: Platform, make: Any, device: Any) -> None:
    assert make(device).device.type == "cpu"


def test_other_devices_mean_themselves(cpu: Platform) -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


def test_only_megatron_is_told_that_there_is_a_gpu(cpu: Platform) -> None:
    assert as_megatron("torch.cuda.is_available()") is True
    assert torch.cuda.is_available() is False
    assert as_megatron("torch.cuda.device_count()") >= 1
    assert torch.cuda.device_count() == 0


def test_only_megatron_sees_cuda_type_names(cpu: Platform) -> None:
    assert as_megatron("torch.ones(1).type()") == "torch.cuda.FloatTensor"
    assert as_megatron("torch.ones(1).bfloat16().type()") == "torch.cuda.BFloat16Tensor"
    assert as_megatron("torch.ones(1).type(torch.int64).dtype") is torch.int64
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_streams_and_events(cpu: Platform) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0.0


def test_memory_is_that_of_the_process(cpu: Platform) -> None:
    # Pages of its own: torch's allocator may have 64 MiB to spare from an earlier test.
    block = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)
    before = torch.cuda.memory_allocated()
    block.fill_(1)
    assert torch.cuda.memory_allocated() - before > 48 << 20
    assert torch.cuda.max_memory_allocated() >= block.nbytes


def test_the_random_streams_of_device_and_host_are_apart(cpu: Platform) -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    host = as_megatron("torch.get_rng_state()")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert torch.equal(as_megatron("torch.get_rng_state()"), host), (
        "draws of the device leave the host's alone"
    )
    assert torch.equal(torch.get_rng_state(), torch.cuda.get_rng_state()), "PyTorch itself sees its own"


def test_nothing_is_compiled(cpu: Platform) -> None:
    def double(x: int) -> int:
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(dynamic=True)(double) is double


def test_optimizers_still_work(cpu: Platform) -> None:
    """PyTorch's optimizers ask torch.cuda about the world, and import Dynamo."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    (weight * weight).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert bool((weight < 1).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu_is_the_cpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    platform = select_platform("auto")
    assert (platform.name, platform.device.type, platform.backend) == ("cpu", "cpu", "gloo")
    message = capsys.readouterr().err
    assert message.startswith("hexi: no GPU found")
    assert message.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(
        PlatformError, match=r"--hexi-platform cuda: .* sees no GPU .* use --hexi-platform cpu"
    ):
        select_platform("cuda")


def test_with_a_gpu_auto_is_cuda_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    platform = select_platform("auto")
    assert (platform.name, platform.device, platform.backend) == ("cuda", torch.device("cuda", 3), "nccl")
    before = snapshot()
    platform.install()
    assert snapshot() == before
    assert select_platform("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "auto"),
        (["--lr", "1e-3", "--hexi-platform", "cpu", "--bf16"], "cpu"),
        (["--hexi-platform=cuda"], "cuda"),
        (["--hexi-plat", "cpu"], "auto"),
    ],
)
def test_the_flag_is_read_before_megatron_parses(argv: list[str], name: str) -> None:
    assert requested_platform(argv) == name


@pytest.mark.parametrize("argv", [["--hexi-platform", "tpu"], ["--hexi-platform"]])
def test_a_flag_without_a_known_value_is_refused(argv: list[str]) -> None:
    with pytest.raises(PlatformError, match=r"--hexi-platform: .*give auto, cpu or cuda"):
        requested_platform(argv)


def megatron_defaults() -> Namespace:
    return Namespace(
        distributed_backend="nccl",
        transformer_impl="transformer_engine",
        apply_rope_fusion=True,
        masked_softmax_fusion=True,
        no_persist_layer_norm=False,
        gradient_accumulation_fusion=True,
    )


def test_defaults_that_need_a_gpu_are_replaced_and_named() -> None:
    args = megatron_defaults()
    changed = adjust_cpu_arguments(args, given={"--lr"})
    assert args == Namespace(
        distributed_backend="gloo",
        transformer_impl="local",
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        no_persist_layer_norm=True,
        gradient_accumulation_fusion=False,
    )
    assert changed[:3] == ["--distributed-backend gloo", "--transformer-impl local", "--no-rope-fusion"]
    assert adjust_cpu_arguments(args, given=set()) == []


@pytest.mark.parametrize("flag", ["--distributed-backend", "--transformer-impl"])
def test_what_the_user_asked_for_is_refused_by_name(flag: str) -> None:
    with pytest.raises(PlatformError, match=f"{flag} .*: needs a GPU"):
        adjust_cpu_arguments(megatron_defaults(), given={flag})


def test_a_user_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop, user_errors():
        raise PlatformError("no")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "hexi: error: [rank 3] no\n"


def test_packages_for_gpus_cannot_be_imported_on_the_cpu(tmp_path):
    """Where they are installed, Megatron would take their kernels for tensors of the CPU."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / f"{package}.py").write_text("")
    program = """
from importlib.util import find_spec
from megatron_hexi.platform.cpu import cpu_platform

platform = cpu_platform()
for is_hidden in (True, False):
    platform.install() if is_hidden else platform.remove()
    for package in ("transformer_engine", "apex"):
        assert (find_spec(package) is None) is is_hidden, (package, is_hidden)
"""
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, check=True)
