"""The doctor's rules: facts in, problems out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hexi.doctor.facts import (
    Checkout,
    Driver,
    Facts,
    Gpu,
    InfinibandPort,
    Interface,
    KernelChoice,
    Limits,
    NetworkFacts,
    Package,
    PatchState,
    Torch,
)
from megatron_hexi.doctor.findings import Problem, healthy, problem_of
from megatron_hexi.doctor.rules import find_problems

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.6)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79.2)
VERDICTS = (("flash-attn-3", ""), ("cudnn", ""), ("flash-attn-2", ""), ("aten-flash", ""), ("math", ""))


def a_node(**changes: object) -> Facts:
    """A node of H100 on which nothing is wrong."""
    packages = (
        Package("megatron-hexi", "0.1.0"),
        Package("torch", "2.13.0a0+8145d630e8.nv26.06", ">=2.11"),
        Package("megatron-core", "0.19.2", ">=0.19,<0.20"),
        Package("transformer-engine", "2.16.0"),
        Package("apex", "0.1"),
        Package("tensorboard", "2.20"),
        Package("flash-attn", "2.8.3"),
        Package("ortools", "9.15.6755", ">=9.11"),
    )
    facts = Facts(
        host="a",
        rank=None,
        python="3.12.3",
        executable="/usr/bin/python",
        packages=packages,
        torch=Torch("13.3", "92300", "2.30.4", ("sm_80", "sm_90", "sm_100", "compute_120")),
        driver=Driver("580.126.20", "13.0"),
        gpus=(H100,) * 8,
        kernels=(KernelChoice(H100.name, "bf16", 128, "flash-attn-3", VERDICTS),),
        patches=(PatchState("megatron.core.utils:f", "because", "fits"),),
        network=NetworkFacts(
            (
                Interface("lo", True, None, ("127.0.0.1", "::1")),
                Interface("eth0", True, 25000, ("10.0.0.1",)),
                Interface("eth1", False, 25000, ("10.0.1.1",)),
            ),
            (InfinibandPort("mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),),
            ("10.0.0.1",),
        ),
        limits=Limits(64.0, None),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def with_package(facts: Facts, package: Package) -> Facts:
    others = tuple(other for other in facts.packages if other.name != package.name)
    return replace(facts, packages=(*others, package))


def with_variables(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment={**facts.environment, **variables})


def the_problem(facts: Facts) -> Problem:
    (problem,) = find_problems(facts)
    return problem


def test_nothing_is_wrong_with_a_healthy_node() -> None:
    assert find_problems(a_node()) == []


@pytest.mark.parametrize(
    ("package", "what", "remedy"),
    [
        (Package("torch", None, ">=2.11"), "torch is not installed", "pip install 'torch>=2.11'"),
        (Package("torch", "2.9.1", ">=2.11"), "torch 2.9.1 is installed, and >=2.11", "'torch>=2.11'"),
        (Package("megatron-core", "0.20.0", ">=0.19,<0.20"), "0.20.0", "'megatron-core>=0.19,<0.20'"),
        (
            Package("flash-attn", "2.8.3", broken="ImportError: undefined symbol: _ZN3c10"),
            "flash-attn 2.8.3 cannot be imported (ImportError: undefined symbol: _ZN3c10)",
            "--no-build-isolation --no-cache-dir flash-attn",
        ),
        (
            Package("apex", "0.1", broken="OSError: libcudart.so.12"),
            "apex 0.1 cannot be imported",
            "remove it",
        ),
        (Package("ortools", "9.15", ">=9.11", broken="ImportError: x"), "ortools 9.15", "'ortools>=9.11'"),
    ],
    ids=lambda value: value.name if isinstance(value, Package) else "",
)
def test_a_package_that_does_not_serve_is_an_error(package: Package, what: str, remedy: str) -> None:
    problem = the_problem(with_package(a_node(), package))
    assert problem.severity == "error"
    assert what in problem.what
    assert remedy in problem.remedy


def test_what_is_broken_by_something_missing_is_said_once() -> None:
    facts = with_package(a_node(torch=None, gpus=(), kernels=()), Package("torch", None, ">=2.11"))
    broken = "ModuleNotFoundError: No module named 'torch'"
    facts = with_package(facts, Package("megatron-core", "0.19.2", ">=0.19,<0.20", broken))
    facts = replace(facts, patches=(), unknown=(("kernels", broken), ("patches", broken)))
    assert the_problem(facts).what == "torch is not installed"


def test_without_transformer_engine_there_are_two_ways_on() -> None:
    facts = with_package(a_node(), Package("transformer-engine", None))
    problem = the_problem(facts)
    assert problem.severity == "warning"
    assert "--transformer-impl local" in problem.remedy
    notes = find_problems(with_package(facts, Package("apex", None)))
    assert [problem.severity for problem in notes] == ["warning", "note"]
    assert "--no-gradient-accumulation-fusion" in notes[1].remedy


@pytest.mark.parametrize(("triton", "count"), [("3.3.1", 0), ("3.6.0", 1), ("3.7.1", 0)])
def test_delta_nets_on_hopper_need_another_triton(triton: str, count: int) -> None:
    facts = with_package(a_node(), Package("flash-linear-attention", "0.6.0"))
    facts = with_package(facts, Package("triton", triton))
    assert len(find_problems(facts)) == count
    assert all("pip install tilelang" in problem.remedy for problem in find_problems(facts))
    assert not find_problems(with_package(facts, Package("tilelang", "0.1.9")))
    assert not find_problems(replace(facts, gpus=(A100,) * 8, kernels=()))


def test_with_transformer_engine_megatron_still_asks_for_apex() -> None:
    problem = the_problem(with_package(a_node(), Package("apex", None)))
    assert problem.severity == "note"
    assert "fused_weight_gradient_mlp_cuda" in problem.what
    assert "--no-gradient-accumulation-fusion" in problem.remedy


def test_logs_that_would_not_be_written_are_told_of() -> None:
    problem = the_problem(with_package(a_node(), Package("tensorboard", None)))
    assert problem.severity == "note"
    assert "--tensorboard-dir writes nothing" in problem.what


def test_a_cudnn_that_torch_refuses_is_an_error() -> None:
    node = a_node()
    assert node.torch is not None
    problem = the_problem(replace(node, torch=replace(node.torch, cudnn=None, cudnn_folder="/opt/cudnn/lib")))
    assert problem.severity == "error"
    assert problem.remedy == "export LD_LIBRARY_PATH=/opt/cudnn/lib:$LD_LIBRARY_PATH"


def test_a_patch_that_does_not_fit_names_what_changed() -> None:
    patch = PatchState(
        "megatron.core.utils:f",
        "because",
        "does not fit",
        "patch of megatron.core.utils:f: expected the parameters a, b, found a, c; use megatron-core >=0.19",
    )
    problem = the_problem(a_node(patches=(patch,)))
    assert problem == Problem(
        "error",
        "patch of megatron.core.utils:f: expected the parameters a, b, found a, c",
        "use megatron-core >=0.19",
    )


def test_patches_of_another_megatron_are_not_listed_one_by_one() -> None:
    patch = PatchState("megatron.core.utils:f", "because", "does not fit", "found 0.18; use 0.19")
    facts = with_package(a_node(patches=(patch,) * 20), Package("megatron-core", "0.18.0", ">=0.19,<0.20"))
    assert "0.18.0" in the_problem(facts).what


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"torch": Torch(None, None, None)}, "built without CUDA", "docs/docker.md"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES=''", "unset"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "-1"}}, "hides all", "unset"),
        (
            {"driver": Driver("535.1", "12.2")},
            "up to CUDA 12.2, torch is built for 13.3",
            "driver 580 or newer",
        ),
        ({"driver": Driver("580.1", None)}, "torch sees no GPU", "--gpus all"),
    ],
)
def test_a_driver_without_gpus_is_explained(changes: dict[str, object], what: str, remedy: str) -> None:
    problem = the_problem(a_node(**{"gpus": (), "kernels": (), **changes}))
    assert problem.severity == "error"
    assert what in problem.what
    assert remedy in problem.remedy


def test_a_machine_without_gpus_is_healthy() -> None:
    problem = the_problem(a_node(gpus=(), kernels=(), driver=Driver(None, None)))
    assert problem.severity == "note"
    assert healthy([problem])


@pytest.mark.parametrize(
    ("capability", "has_code"),
    [((7, 0), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((11, 0), False), ((12, 1), True)],
)
def test_code_for_a_gpu(capability: tuple[int, int], has_code: bool) -> None:
    """Machine code serves its major version; the intermediate form of 12.0 serves all that come after."""
    assert (find_problems(a_node(gpus=(Gpu("some", capability, 80.0),), kernels=())) == []) is has_code


def test_a_rank_that_sees_too_few_gpus() -> None:
    facts = with_variables(a_node(gpus=(H100,), rank=5), LOCAL_RANK="5")
    problem = the_problem(facts)
    assert problem.severity == "error"
    assert "LOCAL_RANK is beyond the GPUs that the rank sees (1)" in problem.what
    assert "--gpus-per-node" in problem.remedy


def test_a_faster_kernel_is_named_where_only_its_package_is_missing() -> None:
    missing = (("flash-attn-3", "the package flash_attn_interface is not installed"), *VERDICTS[1:])
    problem = the_problem(a_node(kernels=(KernelChoice(H100.name, "bf16", 128, "cudnn", missing),)))
    assert (problem.severity, problem.remedy) == ("note", "install flash-attn-3")
    slower = (*VERDICTS[:2], ("flash-attn-2", "the package flash_attn is not installed"))
    assert find_problems(a_node(kernels=(KernelChoice(H100.name, "bf16", 128, "cudnn", slower),))) == []


def test_the_plain_kernel_on_a_gpu_is_a_warning() -> None:
    refused = tuple((name, "it needs compute capability 8.0") for name, _ in VERDICTS[:-1])
    kernels = (KernelChoice("V100", "bf16", 128, "math", (*refused, ("math", ""))),)
    problem = the_problem(a_node(kernels=kernels))
    assert problem.severity == "warning"
    assert "cudnn (it needs compute capability 8.0)" in problem.remedy


@pytest.mark.parametrize(
    ("lacks", "remedy"),
    [
        ("Triton finds no C compiler: CC is not set, and there is neither gcc nor clang", "install gcc"),
        ("Triton finds no Python.h in /usr/include/python3.12", "python3-dev"),
        ("Triton is not installed", "pip install triton"),
    ],
)
def test_what_triton_needs_is_a_warning_on_gpus(lacks: str, remedy: str) -> None:
    problem = the_problem(a_node(triton_lacks=lacks))
    assert problem.severity == "warning"
    assert lacks in problem.what
    assert "plain torch" in problem.what
    assert remedy in problem.remedy
    assert all("Triton" not in one.what for one in find_problems(a_node(triton_lacks=lacks, gpus=())))


def test_a_torch_without_nccl() -> None:
    assert "NCCL" in the_problem(a_node(torch=Torch("13.3", None, None, ("sm_90",)))).what


def test_a_checkout() -> None:
    assert find_problems(a_node(checkout=Checkout("/m", "patched"))) == []
    assert "hexi patch /m" in the_problem(a_node(checkout=Checkout("/m", "not patched"))).remedy
    unknown = Checkout("/m", "unknown", "/m/pretrain_gpt.py: not there; give the folder of a checkout")
    assert the_problem(a_node(checkout=unknown)).severity == "error"


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME=ib names no interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth names no interface"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "NCCL_SOCKET_IFNAME=eth1 names no interface"),  # it is down
        ({"NCCL_SOCKET_IFNAME": "^eth,lo"}, "NCCL_SOCKET_IFNAME=^eth,lo names no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth names no interface"),
        ({"NCCL_TOPO_FILE": "/not/there"}, "NCCL_TOPO_FILE=/not/there"),
    ],
)
def test_variables_that_break_jobs(variables: dict[str, str], what: str) -> None:
    problem = the_problem(with_variables(a_node(), **variables))
    assert problem.severity == "error"
    assert what in problem.what


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0,eth1"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "^=lo"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_IB_HCA": "mlx5"},
        {"NCCL_IB_HCA": "=mlx5_0:1"},
        {"NCCL_P2P_DISABLE": "0"},
    ],
    ids=str,
)
def test_variables_that_are_right(variables: dict[str, str]) -> None:
    assert find_problems(with_variables(a_node(), **variables)) == []


def test_blackwell_alone_may_have_more_connections() -> None:
    b200 = Gpu("B200", (10, 0), 180.0)
    assert find_problems(with_variables(a_node(gpus=(b200,)), CUDA_DEVICE_MAX_CONNECTIONS="32")) == []
    mixed = with_variables(a_node(gpus=(b200, H100)), CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert the_problem(mixed).severity == "error"


@pytest.mark.parametrize(
    ("changes", "variables", "what"),
    [
        ({}, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ({}, {"CUDA_LAUNCH_BLOCKING": "1"}, "nothing on a GPU overlaps"),
        ({}, {"NCCL_IB_DISABLE": "1"}, "by TCP"),
        ({}, {"NCCL_IB_HCA": "mlx4"}, "names no InfiniBand device"),
        ({"limits": Limits(0.0625, None)}, {}, "/dev/shm holds 64 MiB"),
        ({"limits": Limits(64.0, 0.008)}, {}, "only 0.008 GiB may be locked"),
        ({"unknown": (("network", "OSError: no"),)}, {}, "could not inspect network (OSError: no)"),
    ],
)
def test_what_makes_a_job_slow_is_a_warning(
    changes: dict[str, object], variables: dict[str, str], what: str
) -> None:
    problem = the_problem(with_variables(a_node(**changes), **variables))
    assert problem.severity == "warning"
    assert what in problem.what


def test_a_port_that_is_down() -> None:
    network = a_node().network
    ports = (*network.infiniband, InfinibandPort("mlx5_1", 1, "DOWN", "", "InfiniBand"))
    assert "mlx5_1 is DOWN" in the_problem(a_node(network=replace(network, infiniband=ports))).what


def test_a_machine_whose_name_is_the_loopback() -> None:
    """Right within one node; over several, gloo gives the others an address that is theirs too."""
    facts = a_node(network=replace(a_node().network, host_addresses=("127.0.1.1",)))
    alone = with_variables(facts, WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
    several = with_variables(facts, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    assert the_problem(alone).severity == "note"
    assert the_problem(several).severity == "warning"
    assert "GLOO_SOCKET_IFNAME=eth0" in the_problem(several).remedy
    assert find_problems(with_variables(several, GLOO_SOCKET_IFNAME="eth0")) == []


def test_a_machine_that_nobody_can_reach() -> None:
    network = NetworkFacts((Interface("lo", True, None, ("127.0.0.1",)),), (), ("10.0.0.1",))
    assert "no network interface but the loopback" in the_problem(a_node(network=network)).what


def test_errors_come_first_and_every_problem_has_a_remedy() -> None:
    facts = with_variables(
        with_package(a_node(), Package("transformer-engine", None)), NCCL_DEBUG="INFO", NCCL_TOPO_FILE="/no"
    )
    problems = find_problems(facts)
    assert [problem.severity for problem in problems] == ["error", "warning", "note"]
    assert all(problem.remedy for problem in problems)
    assert not healthy(problems)


def test_the_line_of_an_error_is_cut_before_its_remedy() -> None:
    assert problem_of("error", "a: b; c; do d") == Problem("error", "a: b; c", "do d")
    assert problem_of("error", "a: b").what == "a: b"
