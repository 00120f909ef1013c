"""Manifests of jobs: Kubernetes takes them, and each rank runs on the GPU that its plan names."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given

from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.manifests import PRODUCT_LABEL, manifests, manifests_text, product_labels
from megatron_hexi.kubernetes.pods import elastic_pods, probe_pods, training_pods
from megatron_hexi.kubernetes.settings import read_labels, read_resources, read_volume
from tests.support.fleets import read_text
from tests.support.manifests import (
    FLEET,
    GPUS,
    KINDS,
    MODEL,
    as_readers_see,
    check_schema,
    plan_for,
    read_back,
    settings,
)
from tests.support.plans import RANDOMS, examples


def ranks_of(specs, table):
    """Where each rank runs: its kind, the index of its pod, and the pod's GPU."""
    agents = {}
    for kind, spec in specs.items():
        command = spec["template"]["spec"]["containers"][0]["command"]
        assert command == ["python", "-m", "megatron_hexi.kubernetes.start", "/etc/hexi", kind]
        assert spec["completions"] == spec["parallelism"] == len(table[kind])
        for index, pod in enumerate(table[kind]):
            for one in pod:
                words = dict(word.split("=") for word in one["words"] if word.startswith("--"))
                count = int(words["--nproc-per-node"])
                seen = one["variables"].get("CUDA_VISIBLE_DEVICES")
                gpus = range(count) if seen is None else [int(gpu) for gpu in seen.split(",")]
                assert len(gpus) == count
                agents[int(words["--node-rank"])] = [(kind, index, gpu) for gpu in gpus]
                assert words["--nnodes"] == str(sum(len(pod) for pods in table.values() for pod in pods))
    assert sorted(agents) == list(range(len(agents)))
    return [rank for number in sorted(agents) for rank in agents[number]]


@pytest.mark.parametrize("form", ["job", "jobset"])
@given(RANDOMS)
@examples(40)
def test_each_rank_runs_on_the_plan_s_gpu(form, random: Random):
    """In any order, on nodes used in part: of its node's kind, a node of its own pod, a GPU of its own."""
    machines = read_text(FLEET)
    gpus = random.sample(range(GPUS), random.randint(1, GPUS))
    pods = training_pods(plan_for(gpus), machines, settings(form))
    specs, table, hosts = read_back(manifests_text(manifests(pods, {}, settings(form))))
    found = ranks_of(specs, table)
    assert len(found) == len(gpus) == len(set(found))
    pod_of: dict[int, tuple[str, int]] = {}
    used = Counter(machines.ranks[gpu].node for gpu in gpus)
    for gpu, (kind, index, _) in zip(gpus, found, strict=True):
        node = machines.ranks[gpu].node
        base = next(name for name, nodes in KINDS.items() if node in nodes)
        assert kind in (base, f"{base}-{used[node]}")
        assert pod_of.setdefault(node, (kind, index)) == (kind, index)
        limits = specs[kind]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == str(used[node])
        terms = specs[kind]["template"]["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        expected = list(product_labels(machines.ranks[gpu].device.name))
        assert terms == [{"matchExpressions": [{"key": PRODUCT_LABEL, "operator": "In", "values": expected}]}]
    assert len(set(pod_of.values())) == len(pod_of)
    mains = {
        word.partition("=")[2]
        for pods_ in table.values()
        for pod in pods_
        for one in pod
        for word in one["words"]
        if word.startswith("--master-addr")
    }
    first, index = pod_of[machines.ranks[gpus[0]].node]
    replica = "-0" if form == "jobset" else ""
    assert mains == {f"train-{first}{replica}-{index}.train"}
    assert mains <= hosts


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize("least", [None, 2])
def test_kubernetes_takes_the_objects(form, least):
    """A fleet of three kinds, with every option."""
    chosen = settings(
        form,
        namespace="ml",
        least=least,
        volumes=(read_volume("train:/train"), read_volume("/data/sets:/data:ro")),
        labels={"l40s": {"pool": "slow"}},
        resources={"": {"rdma/hca": "1", "memory": "1Ti"}},
    )
    find = training_pods if least is None else elastic_pods
    objects = manifests(find(plan_for(range(GPUS)), read_text(FLEET), chosen), {"job.args": MODEL}, chosen)
    check_schema(yaml.safe_load_all(manifests_text(objects)))
    broken = json.loads(json.dumps(objects).replace('"subdomain"', '"subdomein"'))
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_schema(broken)


def test_ranks_that_alternate_between_two_nodes_are_two_starts_in_each_pod():
    pods = training_pods(plan_for([0, 3, 1, 4]), read_text(FLEET), settings())
    seen = [[one.variables["CUDA_VISIBLE_DEVICES"] for one in pod] for pod in pods.commands["h100-rack-1"]]
    assert seen == [["0", "1"], ["0", "1"]]


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_an_elastic_job_keeps_its_store_outside_the_nodes(form):
    chosen = settings(form, least=2)
    pods = elastic_pods(plan_for(range(GPUS)), read_text(FLEET), chosen)
    objects = manifests(pods, {"cluster.yaml": FLEET}, chosen)
    specs, table, hosts = read_back(manifests_text(objects))
    assert specs["store"]["completions"] == 1
    assert "resources" not in specs["store"]["template"]["spec"]["containers"][0]
    assert not table["store"][0][0]["trains"]
    for spec in specs.values():
        variables = {entry["name"]: entry for entry in spec["template"]["spec"]["containers"][0]["env"]}
        assert variables["HEXI_SECRET"]["valueFrom"] == {
            "secretKeyRef": {"name": "train-secret", "key": "secret"}
        }
    names = []
    for kind, pods_ in table.items():
        if kind == "store":
            continue
        for pod in pods_:
            words = pod[0]["words"]
            value = {
                flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--") and flag != "--"
            }
            assert value["--rdzv-endpoint"].removesuffix(":29400") in hosts
            assert value["--local-addr"] in hosts
            assert value["--nnodes"] == "2:6"
            names.append((value["--node"], int(value["--nproc-per-node"])))
    machines = read_text(FLEET)
    assert sorted(names) == sorted((node.name, len(node.ranks)) for node in machines.nodes)
    if form == "jobset":
        assert objects[1]["spec"]["successPolicy"] == {
            "operator": "All",
            "targetReplicatedJobs": ["h100-rack-1", "a100", "l40s"],
        }


def test_spares_of_an_elastic_job_are_pods_that_wait():
    machines = read_text(FLEET)
    *used, last = machines.nodes
    chosen = settings(least=2, spares=(last.name,))
    pods = elastic_pods(plan_for([gpu for node in used for gpu in node.ranks]), machines, chosen)
    starts = [pod[0].words for name, kind in pods.commands.items() if name != "store" for pod in kind]
    assert len(starts) == len(machines.nodes)
    assert {words[words.index("--nnodes") + 1] for words in starts} == {f"2:{len(used)}"}
    waiting = [words[words.index("--node") + 1] for words in starts if "--spare" in words]
    assert waiting == [last.name]
    with pytest.raises(
        HexiError, match=r"--spare x: the plan uses this node, or the cluster file lacks it; give one of "
    ):
        elastic_pods(plan_for([0, 1, 2]), machines, settings(least=1, spares=("x",)))
    with pytest.raises(HexiError, match="the plan uses all nodes: leave --spare out"):
        elastic_pods(plan_for(range(GPUS)), machines, settings(least=1, spares=(last.name,)))


def test_an_elastic_job_uses_whole_nodes():
    with pytest.raises(HexiError, match=r"2 of the 3 GPUs of H100.rack_1-0, and an elastic job uses whole"):
        elastic_pods(plan_for([0, 1]), read_text(FLEET), settings(least=1))
    with pytest.raises(HexiError, match="--elastic 7: the plan has 6 nodes; give 1 to 6"):
        elastic_pods(plan_for(range(GPUS)), read_text(FLEET), settings(least=7))


def test_a_probe_runs_on_all_nodes_in_the_file_s_order():
    words = ("-o", "/train/it's here.yaml")
    pods = probe_pods(read_text(FLEET), settings(), words)
    specs, table, _ = read_back(manifests_text(manifests(pods, {}, settings())))
    found = ranks_of(specs, table)
    assert [kind for kind, _, _ in found] == ["h100-rack-1"] * 6 + ["a100"] * 4 + ["l40s"] * 6
    assert all(pod[0]["words"][-3:] == ["probe", *words] for pods_ in table.values() for pod in pods_)


def test_hosts_and_labels_choose_nodes():
    text = FLEET.replace("{name: a100, gpu", "{name: a100, hosts: 'n[7-7]', gpu")
    chosen = settings(
        labels=read_labels(["l40s:pool=slow", "l40s:zone=z1"], ["l40s"]),
        resources=read_resources(["rdma/hca=1", "a100:rdma/hca=4", "memory=1Ti"], ["a100"]),
        volumes=(read_volume("train:/train"), read_volume("/data/sets:/data:ro")),
    )
    objects = manifests(training_pods(plan_for(range(GPUS)), read_text(text), chosen), {}, chosen)
    specs, _, _ = read_back(manifests_text(objects))
    pods = {kind: spec["template"]["spec"] for kind, spec in specs.items()}

    def terms(kind):
        affinity = pods[kind]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        return {one["key"]: one["values"] for one in term["matchExpressions"]}

    assert terms("a100") == {"kubernetes.io/hostname": ["n7"]}
    assert terms("l40s") == {"pool": ["slow"], "zone": ["z1"]}
    limits = {kind: pod["containers"][0]["resources"]["limits"] for kind, pod in pods.items()}
    assert limits["a100"] == {"nvidia.com/gpu": "4", "rdma/hca": "4", "memory": "1Ti"}
    assert limits["l40s"] == {"nvidia.com/gpu": "2", "rdma/hca": "1", "memory": "1Ti"}
    assert pods["a100"]["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pods["a100"]["volumes"][2:] == [
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "train"}},
        {"name": "volume-1", "hostPath": {"path": "/data/sets", "type": "Directory"}},
    ]
    assert pods["a100"]["containers"][0]["volumeMounts"][2:] == [
        {"name": "volume-0", "mountPath": "/train"},
        {"name": "volume-1", "mountPath": "/data", "readOnly": True},
    ]


#: What one version of YAML or another takes for a number, a boolean, a date, nothing, or a merged mapping.
AMBIGUOUS = (
    *("y", "N", "no", "on", "OFF", "True", "null", "NULL", "nan", "inf"),
    *("1", "1e3", "12e4", "12e4567", "1.0", "1.e3", "0o17", "017", "0b1", "0x1F", "0x1f", "1_000", "1E3"),
    *("2026-11-28", "1.2.3", "190.5e-3"),
)


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_every_reader_of_yaml_takes_a_text_for_a_text(form):
    """Names that Kubernetes takes stay what they are, in each place where the user's words stand."""
    names = [re.sub("[._]", "-", text.lower()) for text in AMBIGUOUS]
    chosen = settings(
        form,
        namespace="1e3",
        volumes=tuple(read_volume(f"{name}:/{number}") for number, name in enumerate(names)),
        labels=read_labels([f"l40s:{text}={text}" for text in AMBIGUOUS], ["l40s"]),
    )
    files = {text: text for text in AMBIGUOUS} | {"job.args": "1e3\n#y\n"}
    objects = manifests(training_pods(plan_for(range(GPUS)), read_text(FLEET), chosen), files, chosen)
    assert as_readers_see(manifests_text(objects)) == objects


def test_hosts_that_no_label_can_hold_are_refused():
    text = FLEET.replace("gpu: A100-SXM-80GB, gpus: 4", "gpu: A100-SXM-80GB, gpus: 4, hosts: a_/b")
    pods = training_pods(plan_for(range(GPUS)), read_text(text), settings())
    with pytest.raises(HexiError, match="nodes a100: the host a_/b cannot be a node's name in Kubernetes"):
        manifests(pods, {}, settings())
