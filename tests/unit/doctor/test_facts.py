"""What the doctor finds: on made-up machines, and on this one."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import fields

import pytest
from pydantic import TypeAdapter

from megatron_hexi.doctor import gather, software
from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.gather import collect
from megatron_hexi.doctor.machine import find_environment, find_network
from megatron_hexi.doctor.rules import _parts_unknown
from megatron_hexi.doctor.software import find_driver, find_packages, patch_state
from megatron_hexi.patching import Patch


@pytest.fixture(scope="module")
def here() -> Facts:
    return collect(None, Checkout("/m", "patched"))


def test_nothing_is_left_unknown_here(here: Facts) -> None:
    assert here.unknown == ()
    assert here.package("torch").version
    assert here.torch is not None


def test_every_patch_fits_here(here: Facts) -> None:
    assert len(here.patches) > 10
    assert {patch.state for patch in here.patches} <= {"fits", "not needed"}


def test_the_first_kernel_that_does_not_refuse_is_taken(here: Facts) -> None:
    assert {choice.dtype for choice in here.kernels} == {"bf16", "fp16", "fp32"}
    for choice in here.kernels:
        assert choice.kernel == next(name for name, reason in choice.verdicts if not reason)


def test_facts_survive_the_way_to_rank_0(here: Facts) -> None:
    kind = TypeAdapter(Facts)
    assert kind.validate_json(kind.dump_json(here)) == here


def test_a_part_that_fails_leaves_the_others(monkeypatch) -> None:
    def broken() -> None:
        raise OSError("a disk\nis gone")

    monkeypatch.setattr(gather, "_PARTS", {"driver": broken, "limits": gather._PARTS["limits"]})
    facts = collect(3)
    assert facts.unknown == (("driver", "OSError: a disk"),)
    assert facts.limits.shared_memory_gib
    assert facts.rank == 3


def test_progress_is_told_of_every_part(monkeypatch) -> None:
    monkeypatch.setattr(gather, "_PARTS", {"driver": find_driver, "limits": gather._PARTS["limits"]})
    told: list[tuple[str, int, int]] = []
    collect(None, progress=lambda *step: told.append(step))
    assert told == [("looking at driver", 0, 2), ("looking at limits", 1, 2)]


def test_a_library_that_cannot_be_imported_is_broken(monkeypatch, tmp_path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('undefined symbol: x\\nat y')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "_IMPORTED", {"flash-attn": (("flash-attn",), "flash_attn")})
    (package,) = (package for package in find_packages() if package.name == "flash-attn")
    assert (package.version, package.broken) == ("unknown", "OSError: undefined symbol: x")


def test_a_checkout_on_the_path_comes_before_the_installed_wheel(monkeypatch) -> None:
    core = types.ModuleType("megatron.core")
    core.__version__ = "0.18.3+abc123"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    (package,) = (package for package in find_packages() if package.name == "megatron-core")
    assert package.version == "0.18.3"
    assert package.needs is not None


def test_the_driver_says_its_version(tmp_path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.20  Release Build\nGCC 12\n"
    )
    assert find_driver(file).version == "580.126.20"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n")
    assert find_driver(file).version == "535.104.05"
    assert find_driver(tmp_path / "absent").version is None


def test_infiniband_ports(tmp_path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "mlx5_0" / "ports" / "1" / "link_layer").write_text("InfiniBand\n")
    first, second = find_network(tmp_path).infiniband
    assert (first.device, first.port, first.state, first.link_layer) == ("mlx5_0", 1, "ACTIVE", "InfiniBand")
    assert (second.device, second.state, second.rate) == ("mlx5_1", "DOWN", "400 Gb/sec (4X NDR)")


def test_this_machine_has_a_loopback(here: Facts) -> None:
    assert any("127.0.0.1" in interface.addresses for interface in here.network.interfaces)


def test_only_variables_of_communication_are_read() -> None:
    environment = {"NCCL_DEBUG": "INFO", "SECRET_TOKEN": "x", "RANK": "1", "HOME": "/", "GLOO_A": "b"}
    assert list(find_environment(environment)) == ["GLOO_A", "NCCL_DEBUG", "RANK"]


def _patch(**changes: object) -> Patch:
    arguments: dict[str, object] = {
        "build": lambda original: original,
        "package": "pytest",
        "versions": ">=9",
    }
    return Patch(**{"target": "textwrap:indent", "why": "because", **arguments, **changes})  # type: ignore[arg-type]


def test_the_state_of_a_patch_says_which_parameter_changed() -> None:
    assert patch_state(_patch(parameters=("text", "prefix", "predicate"))).state == "fits"
    assert patch_state(_patch(requires="no_such_module")).state == "not needed"
    changed = patch_state(_patch(parameters=("text", "prefix")))
    assert changed.state == "does not fit"
    assert "found text, prefix, predicate" in changed.problem
    assert patch_state(_patch(target="textwrap:gone")).state == "does not fit"
    assert patch_state(_patch(versions="<1")).state == "does not fit"


def test_every_fact_is_described() -> None:
    for field in fields(Facts):
        assert field.name in {"network", "limits", "driver"} or f"{field.name}:" in (Facts.__doc__ or "")


def test_it_imports_nothing_that_only_compiling_needs() -> None:
    """Which takes as long as all the rest."""
    program = """if True:
        import sys
        from megatron_hexi.doctor.gather import collect
        facts = collect(None)
        import torch
        assert {patch.state for patch in facts.patches} <= {"fits", "not needed"}, facts.patches
        assert any(patch.state == "fits" for patch in facts.patches)
        assert torch.compile.__module__ == "torch"
        sys.exit("torch._dynamo" in sys.modules or "torch._inductor" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


LOST = "Unable to determine the device handle for GPU0000:3D:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("script", "severity", "said"),
    [
        (f"echo '{LOST}'; exit 255", "error", f"{LOST} (`nvidia-smi --query-gpu"),
        (f"echo '{LOST}' >&2; exit 9", "error", f"{LOST} (`nvidia-smi"),
        (f"echo '{LOST}'", "error", f"nvidia-smi fails: {LOST} (printed by"),
        ("exit 3", "error", "nothing was printed (`nvidia-smi"),
        ("echo 'Field \"x\" is not a valid field to query.'; exit 2", "warning", "is not a valid field"),
        (
            "case $1 in topo) echo no; exit 1;; esac",
            "warning",
            "could not inspect gpu_links (no (`nvidia-smi topo",
        ),
    ],
)
def test_what_nvidia_smi_says_as_it_fails_is_shown(monkeypatch, tmp_path, script, severity, said) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    parts = {part: gather._PARTS[part] for part in ("gpu_states", "gpu_links")}
    monkeypatch.setattr(gather, "_PARTS", parts)
    found = list(_parts_unknown(collect(None)))
    assert [problem.severity for problem in found] == [severity]
    assert said in found[0].what
