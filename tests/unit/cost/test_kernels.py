"""An attention kernel for each kind of GPU: what is chosen, what is assumed, what is refused."""

import pytest

from megatron_hexi.cluster import cluster_from_yaml, device
from megatron_hexi.cost import assumed_kernels, planned_kernels
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.errors import ClusterError, HexiError
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan.terms import kernel_on
from megatron_hexi.yaml_file import read_yaml

H100, A100 = "H100-SXM-80GB", "A100-SXM-80GB"
NODES = f"name: mixed\nnodes:\n- {{name: h, gpu: {H100}, gpus: 1}}\n- {{name: a, gpu: {A100}, gpus: 1}}\n"
NETWORK = "network: {bandwidth_gb_s: 25}\n"
CURVE = "{points: [[16384, 100]], source: hexi probe}"
MEASURED = f"devices: {{{H100}: {{attention: {{KERNEL: {{causal: {{forward: {CURVE}}}}}}}}}}}\n"


@pytest.fixture
def mixed(tmp_path):
    """Builds the cluster of two kinds; with a kernel that was measured on the H100."""

    def build(kernel=None):
        path = tmp_path / "cluster.yaml"
        measured = "" if kernel is None else MEASURED.replace("KERNEL", kernel)
        path.write_text(NODES + NETWORK + measured)
        return cluster_from_yaml(read_yaml(path))

    return build


@pytest.mark.parametrize(
    ("text", "gpu", "kernel"),
    [
        (None, H100, None),
        ("cudnn", H100, "cudnn"),
        ("H100=cudnn", H100, "cudnn"),
        ("H100=cudnn", A100, None),
        ("H100-PCIe=flash-attn-2,H100=cudnn", H100, "cudnn"),
        ("H100=cudnn,H100-PCIe=flash-attn-2", "H100-PCIe-80GB", "flash-attn-2"),
    ],
)
def test_the_longest_beginning_of_a_name_counts(text, gpu, kernel):
    assert kernel_on(text, gpu) == kernel


def test_each_kind_of_gpu_has_its_own_rates():
    job = Job(read_model("gpt-3b"), 16384, kernel="H100=cudnn,A100=flash-attn-2")
    for gpu, kernel in ((H100, "cudnn"), (A100, "flash-attn-2")):
        alone = Job(read_model("gpt-3b"), 16384, kernel=kernel)
        assert device_speeds(device(gpu), job) == device_speeds(device(gpu), alone)


def test_a_kernel_that_nobody_chose_or_measured_is_assumed(mixed):
    cluster = mixed()
    assert planned_kernels(None, cluster) == {H100: "flash-attn-3", A100: "flash-attn-2"}
    assert assumed_kernels(None, cluster, 128) == {H100: ("flash-attn-3", "cudnn")}
    assert assumed_kernels("H100=flash-attn-3", cluster, 128) == {}
    assert planned_kernels("H100=cudnn", cluster) == {H100: "cudnn", A100: "flash-attn-2"}
    assert assumed_kernels("A100=flash-attn-2", cluster, 128) == {H100: ("flash-attn-3", "cudnn")}
    # cuDNN takes no heads of 192 columns, as latent attention has.
    assert assumed_kernels(None, cluster, 192) == {H100: ("flash-attn-3", "flash-attn-2")}


@pytest.mark.parametrize("kernel", ["cudnn", "flash-attn-2", "flash-attn-3"])
def test_what_the_cluster_file_measured_is_the_default(mixed, kernel):
    cluster = mixed(kernel)
    assert planned_kernels(None, cluster)[H100] == kernel
    assert assumed_kernels(None, cluster, 128) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("H100=", "is not GPU=NAME"),
        ("", "is not GPU=NAME"),
        ("=cudnn", "is not GPU=NAME"),
        ("H100=cudnn,flash-attn-2", "is not GPU=NAME"),
        ("H100=a=b", "is not GPU=NAME"),
        ("H100=cudnn,H100=flash-attn-2", "names H100 twice"),
    ],
)
def test_a_choice_that_cannot_be_read_is_refused(text, problem):
    with pytest.raises(HexiError, match=problem):
        Job(read_model("gpt-3b"), 16384, kernel=text)


def test_a_choice_for_no_gpu_of_the_cluster_is_refused(mixed):
    with pytest.raises(HexiError, match=f"no GPU of mixed is a B200; name one of {H100}, {A100}"):
        planned_kernels("H100=cudnn,B200=cudnn", mixed())
    with pytest.raises(ClusterError, match="no curves for kernel flash3; use flash-attn-3 or cudnn"):
        planned_kernels("H100=flash3", mixed())
