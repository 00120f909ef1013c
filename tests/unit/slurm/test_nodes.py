"""GPUs of hosts by their types in Slurm's generic resources (GRES), as `hexi place` reads them."""

from __future__ import annotations

import pytest

from megatron_hexi.cluster import catalog
from megatron_hexi.errors import ClusterError, PlatformError
from megatron_hexi.slurm import parse_nodes, place
from megatron_hexi.slurm.nodes import gpus_of, names_gpu
from tests.unit.slurm.test_placement import A100, H100, cluster, plan_for

#: A site with one partition, no features, and types of GPUs in its generic resources only, in any order.
GRES = """\
gpu01|gpu|(null)|gpu:nvidia_h100_80gb_hbm3:4(S:0-1)
gpu02|gpu|(null)|nvme:1,gpu:a100:4(S:0,1),shard:8
gpu03|gpu|(null)|gpu:l40s:4
gpu04|gpu|(null)|gpu:a100_3g.40gb:8,gpu:a100:2
gpu05|gpu|(null)|gpu:H100:4(IDX:0-3)
"""


def test_gpus_are_found_by_their_type_in_gres():
    known = parse_nodes(GRES)
    machines = cluster(f"a {A100} 1", f"h {H100} 2", "l L40S-48GB 1", per_node=4)
    hosts = ["gpu05", "gpu04", "gpu03", "gpu02", "gpu01"]
    placed = place(plan_for(16), machines, known, hosts)
    assert placed.nodes == {"a-0": "gpu02", "h-0": "gpu05", "h-1": "gpu01", "l-0": "gpu03"}
    assert placed.idle == ("gpu04",)


@pytest.mark.parametrize(
    ("types", "place_of"),
    [
        (("a100-40", "a100-80"), {"big-0": "n1", "small-0": "n0"}),
        (("a100-80", "a100_40gb_new"), {"big-0": "n0", "small-0": "n1"}),
        (("a100", "a100"), None),
        (("a100-new", "a100-80"), None),  # a word that is not understood is no memory
    ],
)
def test_gpus_of_one_model_are_told_apart_by_their_memory_or_not_at_all(types, place_of):
    known = parse_nodes("".join(f"n{i}|gpu|(null)|gpu:{kind}:8\n" for i, kind in enumerate(types)))
    machines = cluster("big A100-SXM-80GB 1", "small A100-SXM-40GB 1")
    if place_of is not None:
        assert place(plan_for(16), machines, known, ["n0", "n1"]).nodes == place_of
        return
    ambiguous = r"GPUs of n0 \(gres gpu:.*:8\) may be the A100.* of .*hosts: h\[01-06\]"
    with pytest.raises(PlatformError, match=ambiguous):
        place(plan_for(16), machines, known, ["n0", "n1"])


def test_a_host_whose_type_is_plain_is_taken_before_an_ambiguous_one():
    known = parse_nodes("n0|gpu|(null)|gpu:a100:8\nn1|gpu|(null)|gpu:a100-80:8\n")
    machines = cluster("big A100-SXM-80GB 1", "small A100-SXM-40GB 1")
    first_eight = plan_for(8, tuple(range(8)))
    assert place(first_eight, machines, known, ["n0", "n1"]).nodes == {"big-0": "n1"}


def test_the_order_of_resources_and_their_sockets_tell_no_nodes_apart():
    known = parse_nodes(
        "gpu01|gpu|ib,nvme|gpu:h100:8(S:0-1),nvme:1\ngpu02|gpu|nvme,ib|nvme:1,gpu:h100:8(S:0,1)\n"
    )
    assert place(plan_for(8), cluster(f"gpu01 {H100} 1"), known, ["gpu02"]).nodes == {"gpu01-0": "gpu02"}


def test_a_job_without_such_gpus_is_refused():
    known = parse_nodes(GRES)
    with pytest.raises(
        PlatformError, match=r"ask sbatch for one more with 4 L40S-48GB \(--gpus-per-node=TYPE:4"
    ):
        place(plan_for(4), cluster("l L40S-48GB 1", per_node=4), known, ["gpu01"])
    with pytest.raises(
        ClusterError, match=r"a node t with 4 T4-16GB, .*types in gres: a100, a100_3g.40gb, h100, l"
    ):
        place(plan_for(4), cluster("t T4-16GB 1", per_node=4), known, ["gpu01"])


@pytest.mark.parametrize(
    ("kind", "gpus"),
    [
        ("h100", {"H100-SXM-80GB", "H100-SXM-96GB", "H100-PCIe-80GB", "H100-NVL-94GB"}),
        ("nvidia_h100_80gb_hbm3", {"H100-SXM-80GB"}),
        ("nvidia_h100_pcie", {"H100-PCIe-80GB"}),
        ("a100-sxm4-40gb", {"A100-SXM-40GB"}),
        ("nvidia_a100_80gb_pcie", {"A100-PCIe-80GB"}),
        ("l40", {"L40-48GB"}),
        ("nvidia_l40s", {"L40S-48GB"}),
        ("rtx_a6000", {"A6000-48GB"}),
        ("nvidia_geforce_rtx_3080_ti", {"RTX3080Ti-12GB"}),
        ("titan_rtx", {"TitanRTX-24GB"}),
        ("tesla_v100-sxm2-32gb", {"V100-SXM2-32GB"}),
        ("nvidia_gh200_480gb", {"GH200-96GB"}),
        ("a100_3g.40gb", {"A100-SXM4-80GB-MIG-3g-40gb"}),
        ("a100_7g.80gb", set()),
        ("3g.40gb", set()),
        ("", set()),
        # As public job scripts request them.
        ("a100-40", {"A100-SXM-40GB"}),
        ("a100_80g", {"A100-SXM-80GB", "A100-PCIe-80GB"}),
        ("a10080gb", {"A100-SXM-80GB", "A100-PCIe-80GB"}),
        ("a100sxm480gb", {"A100-SXM-80GB"}),
        ("a100_20g", set()),  # a slice by its memory
        ("a100_80gb_pcie_3g.40gb", set()),
        ("h100-96", {"H100-SXM-96GB"}),
        ("h100-47", set()),
        ("nvidia_h200_nvl", set()),
        ("v100-32", {"V100-SXM2-32GB"}),
        ("v100l", set()),
        ("teslav100", {"V100-SXM2-32GB", "V100-SXM2-16GB", "V100-PCIe-16GB"}),
        ("nvidia_gh200_120gb", {"GH200-96GB"}),
        ("3090", {"RTX3090-24GB"}),
        ("2080ti", {"RTX2080Ti-11GB"}),
        ("2080_ti", {"RTX2080Ti-11GB"}),
        ("gtx2080ti", {"RTX2080Ti-11GB"}),
        ("2080", set()),
        ("geforcertx3090", {"RTX3090-24GB"}),
        ("titanrtx", {"TitanRTX-24GB"}),
        ("titan_v", set()),
        ("rtxa6000", {"A6000-48GB"}),
        ("quadrortx6000", {"Quadro-RTX-6000-24GB"}),
        ("rtx_6000_ada_generation", {"RTX6000Ada-48GB"}),
        ("rtx_pro_6000", set()),
        ("amd_instinct_mi250x", {"MI250X-128GB"}),
        ("mi250", set()),
        ("tesla", set()),
    ],
)
def test_types_of_gres_name_gpus(kind, gpus):
    own = ("A100-SXM4-80GB-MIG-3g-40gb", "Quadro-RTX-6000-24GB", "RTX6000Ada-48GB", "MI250X-128GB")
    names = [*catalog(), *own]
    assert {gpu for gpu in names if names_gpu(kind, gpu)} == gpus


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h100:4(S:0-1)", {"h100": 4}),
        ("gpu:8(S:0-1)", {"": 8}),
        ("gpu", {"": 1}),
        ("(null)", {}),
        ("gres/gpu:L40S:4", {"l40s": 4}),
        ("craynetwork:4,gpu:a100:2(S:0,1),gpu:a100:2,gpu:a100_3g.20gb:4", {"a100": 4, "a100_3g.20gb": 4}),
        ("gpu:h100:no_consume:2", {"h100": 2}),
        ("gpu_mem:80,mps:400,shard:a100:8", {}),
        ("gpu:3090:8,gpu:4090:2(S:0)", {"3090": 8, "4090": 2}),
        ("gpu:no_consume:4", {"": 4}),
    ],
)
def test_gres_is_read(gres, found):
    assert gpus_of(gres) == found
