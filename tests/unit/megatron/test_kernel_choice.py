"""The kernel that a plan was judged with: recorded, pinned in the lines to type, held against the job's."""

from argparse import ArgumentTypeError, Namespace
from dataclasses import replace

import pytest
import torch

from megatron_hexi.cost import shipped_kernels
from megatron_hexi.errors import PlanError, PlatformError
from megatron_hexi.megatron import kernel_choice
from megatron_hexi.megatron.kernel_choice import choose_kernel
from megatron_hexi.plan import JobTerms, Workload, proportional_plan, read_plan
from megatron_hexi.plan.terms import join_kernels, kernel_by_torch, split_kernels
from megatron_hexi.report.launch_lines import megatron_flags
from tests.support.shell import call_hexi

KERNELS = {"H100-SXM-80GB": "flash-attn-3", "A100-SXM-80GB": "flash-attn-2"}
PLAN = replace(proportional_plan(Workload(64, 4, 4, 16), [[[1.0, 1.0]]]), job=JobTerms(kernel=KERNELS))
CLUSTER = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: a100, gpu: A100-SXM-80GB, gpus: 2}
network: {bandwidth_gb_s: 25}
"""


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX3080Ti-12GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA TITAN RTX", "TitanRTX-24GB"),
    ],
)
def test_a_kind_is_known_by_torch_s_name(gpu, kind):
    assert kernel_by_torch({kind: "cudnn", "L4-24GB": "math", "H200-SXM-141GB": "math"}, gpu) == "cudnn"


def test_kinds_that_torch_s_name_does_not_tell_apart_are_not_guessed():
    both = {"H100-SXM-80GB": "cudnn", "H100-PCIe-80GB": "flash-attn-2"}
    assert kernel_by_torch(both, "NVIDIA H100 PCIe") is None
    assert kernel_by_torch({**both, "H100-PCIe-80GB": "cudnn"}, "NVIDIA H100 PCIe") == "cudnn"
    assert kernel_by_torch(both, "") is None


@pytest.fixture
def choose(monkeypatch):
    """Chooses on a GPU that torch calls so, where some kernels are installed."""

    def call(asked, gpu="NVIDIA H100 80GB HBM3", installed=("flash-attn-3", "cudnn", "aten-flash")):
        def select_kernel(name, *_):
            if name != "auto" and name not in installed:
                raise PlatformError(f"kernel {name}: is not installed")
            return Namespace(name=installed[0] if name == "auto" else name)

        monkeypatch.setattr(kernel_choice, "select_kernel", select_kernel)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
        args = Namespace(hexi_kernel=asked, hexi_plan="plan.yaml")
        return choose_kernel(args, PLAN, torch.device("cuda", 0), torch.bfloat16).name

    return call


@pytest.mark.parametrize("asked", ["auto", "flash-attn-3", join_kernels(KERNELS), "A100=cudnn"])
def test_the_plan_s_kernel_is_taken(choose, asked):
    assert choose(asked, installed=("cudnn", "flash-attn-3")) == "flash-attn-3"


def test_another_code_of_the_same_kernel_is_no_contradiction(choose):
    assert choose("aten-flash", gpu="NVIDIA A100-SXM4-80GB") == "aten-flash"


def test_a_contradiction_is_refused_with_both_values(choose):
    with pytest.raises(PlanError, match=r"job\.kernel is flash-attn-3 for NVIDIA H100 .* line has cudnn; .*"):
        choose("cudnn")
    with pytest.raises(PlanError, match=r"job\.kernel is flash-attn-3 .* has cudnn; .* --kernel cudnn"):
        choose("H100=cudnn,A100=flash-attn-2")


def test_where_the_plan_s_is_missing_another_is_taken_and_both_are_said(choose, capsys):
    assert choose("auto", installed=("cudnn",)) == "cudnn"
    said = "".join(capsys.readouterr())
    assert "job.kernel is flash-attn-3" in said
    assert "this rank uses cudnn" in said
    with pytest.raises(PlatformError, match="flash-attn-3"):  # pinned on the command line
        choose("H100=flash-attn-3", installed=("cudnn",))


@pytest.mark.parametrize("text", ["flash3", "H100=flash3", "H100=cudnn,", "H100=cudnn,H100=math"])
def test_what_names_no_kernel_is_refused(text):
    with pytest.raises(ArgumentTypeError):
        kernel_choice.kernel_choice(text)


def test_the_lines_to_type_pin_it():
    job = [
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--micro-batch-size",
        "1",
    ]
    flags = megatron_flags(job, [], PLAN, "plan.yaml")
    text = flags[flags.index("--hexi-kernel") + 1]
    assert split_kernels(text) == shipped_kernels(KERNELS)
    own = megatron_flags(job, ["--hexi-kernel", "auto"], PLAN, "plan.yaml")
    assert own.count("--hexi-kernel") == 1


def test_a_plan_records_the_kernels_it_was_judged_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    job = ("--model", "gpt-3b", "--seq-length", 16384, "--global-batch-size", 4)
    words = ("plan", "cluster.yaml", *job, "--kernel", "H100=cudnn", "-o", "plan.yaml")
    assert call_hexi(monkeypatch, capsys, words).code == 0
    assert read_plan("plan.yaml").job.kernel == {"H100-SXM-80GB": "cudnn", "A100-SXM-80GB": "flash-attn-2"}
    check = ("validate", "plan.yaml", "--cluster", "cluster.yaml")
    assert call_hexi(monkeypatch, capsys, (*check, "--kernel", "H100=cudnn")).code == 0
    refused = call_hexi(monkeypatch, capsys, (*check, "--kernel", "flash-attn-2"))
    assert refused.code == 2
    assert "H100-SXM-80GB=cudnn" in refused.err
    assert "--kernel flash-attn-2" in refused.err
