"""Manifests of `hexi launch --kubernetes`: what Kubernetes takes, and which rank runs on which GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given

from megatron_hexi.argument_file import read_words
from megatron_hexi.cluster import catalog
from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.manifests import manifests, manifests_text
from megatron_hexi.kubernetes.pods import elastic_pods, probe_pods, training_pods
from megatron_hexi.kubernetes.products import PRODUCT_LABEL, product_labels
from megatron_hexi.kubernetes.settings import Settings, read_labels, read_resources, read_volume
from megatron_hexi.kubernetes.start import find_commands, run_commands
from megatron_hexi.plan import Workload, proportional_plan, read_plan, write_plan
from megatron_hexi.slurm.gres import names_gpu
from tests.support.fleets import read_text
from tests.support.plans import RANDOMS, examples
from tests.support.shell import call_hexi, is_one_error_line

FLEET = """\
name: fleet
nodes:
- {name: H100.rack_1, gpu: H100-SXM-80GB, gpus: 3, count: 2}
- {name: a100, gpu: A100-SXM-80GB, gpus: 4}
- {name: l40s, gpu: L40S-48GB, gpus: 2, count: 3}
network: {bandwidth_gb_s: 25}
"""
KINDS = {"h100-rack-1": range(2), "a100": range(2, 3), "l40s": range(3, 6)}
GPUS = 16
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --vocab-size 128"
POD = {"type": "object", "required": ["spec"], "additionalProperties": False, "properties": {"spec": {}}}
#: What the published schema of JobSet v0.11 (config/components/crd/bases) has of the fields written here.
JOBSET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["network", "failurePolicy", "replicatedJobs"],
    "properties": {
        "network": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "enableDNSHostnames": {"type": "boolean"},
                "subdomain": {"type": "string"},
                "publishNotReadyAddresses": {"type": "boolean"},
            },
        },
        "failurePolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "maxRestarts": {"type": "integer"},
                "rules": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "action"],
                        "properties": {
                            "name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                            "action": {"enum": ["FailJobSet", "RestartJobSet"]},
                            "onJobFailureReasons": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                },
            },
        },
        "successPolicy": {
            "type": "object",
            "additionalProperties": False,
            "required": ["operator"],
            "properties": {
                "operator": {"enum": ["All", "Any"]},
                "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
            },
        },
        "replicatedJobs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "template"],
                "properties": {"name": {"type": "string"}, "replicas": {"type": "integer"}, "template": POD},
            },
        },
    },
}


def settings(form: Any = "job", **more: Any) -> Settings:
    return Settings(form=form, image="registry.example/hexi:0.1.0", name="train", **more)


def plan_for(gpus):
    workload = Workload(seq_length=64 * len(gpus), heads=8, kv_heads=8, head_dim=16)
    return dataclasses.replace(proportional_plan(workload, [[[1.0]] * len(gpus)]), gpus=tuple(gpus))


def check_schema(objects):
    """What Kubernetes checks before it takes objects."""
    for document in objects:
        if document["kind"] != "JobSet":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            continue
        jsonschema.validate(document["spec"], JOBSET)
        for one in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **one["template"]}
            kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def read_back(text):
    """From the manifests alone: each job's spec by kind, and the table of commands."""
    objects = list(yaml.safe_load_all(text))
    table = json.loads(objects[0]["data"]["pods.json"])
    if objects[1]["kind"] == "JobSet":
        specs = {one["name"]: one["template"]["spec"] for one in objects[1]["spec"]["replicatedJobs"]}
        hosts = {
            f"train-{name}-0-{index}.train"
            for name, spec in specs.items()
            for index in range(spec["completions"])
        }
    else:
        service, *jobs = objects[1:]
        assert (
            service["spec"]["selector"].items() <= jobs[0]["spec"]["template"]["metadata"]["labels"].items()
        )
        specs = {job["metadata"]["name"].removeprefix("train-"): job["spec"] for job in jobs}
        hosts = {
            f"{job['metadata']['name']}-{index}.{service['metadata']['name']}"
            for job in jobs
            for index in range(job["spec"]["completions"])
        }
    return specs, table, hosts


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
    assert [[one.gpus for one in pod] for pod in pods.commands["h100-rack-1"]] == [[(0,), (1,)], [(0,), (1,)]]


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


#: The catalogue has it with 96 GB, and no driver's list names it.
_WITHOUT_LABEL = {"H100-SXM-96GB"}


@pytest.mark.parametrize("gpu", catalog())
def test_product_labels_name_the_catalogue_s_gpu(gpu):
    labels = product_labels(gpu)
    assert bool(labels) == (gpu not in _WITHOUT_LABEL)
    for label in labels:
        assert names_gpu(label.lower(), gpu)
        assert not any(label in product_labels(other) for other in catalog() if other != gpu)


def test_a_gpu_without_a_label_needs_one():
    text = FLEET.replace("L40S-48GB", "H100-SXM-96GB")
    pods = training_pods(plan_for(range(GPUS)), read_text(text), settings())
    with pytest.raises(HexiError, match=r"label of a H100-SXM-96GB .* give --node-label l40s:LABEL=VALUE"):
        manifests(pods, {}, settings())


@pytest.mark.parametrize("image", ["hexi", "a.b:5000/x/y_z:1.0-rc", "nvcr.io/a/b@sha256:" + "0" * 64])
def test_images_that_are_taken(image):
    assert Settings(form="job", image=image, name="x").image == image


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "trainjob"}, "--kubernetes trainjob: is no form; give job or jobset"),
        ({"image": "a b"}, "--image a b: is no name of an image"),
        ({"image": "x; rm -rf /"}, "is no name of an image"),
        ({"name": "Train"}, "--name Train: give at most 63 lower-case"),
        ({"name": "1st"}, "begin with a letter"),
        ({"name": "a" * 64}, "give at most 63"),
        ({"namespace": "a.b"}, "--namespace a.b: give"),
        ({"volumes": (read_volume("a:/x"), read_volume("b:/x"))}, "another --volume is mounted there"),
        ({"volumes": (read_volume("a:/dev/shm"),)}, "shared memory is mounted there"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(change, said):
    with pytest.raises(HexiError, match=said):
        Settings(**{"form": "job", "image": "x", "name": "train", **change})


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_volume, "work", "give CLAIM:/PATH"),
        (read_volume, "work:relative", "give CLAIM:/PATH"),
        (read_volume, "work:/a/../b", "give CLAIM:/PATH"),
        (read_volume, "work:/a:rw", "give CLAIM:/PATH"),
        (read_volume, "work:/", "give CLAIM:/PATH"),
        (read_volume, "Work:/a", "'Work' is no name of a PersistentVolumeClaim"),
        (read_volume, "/a\nb:/c", "no plain absolute path"),
        (lambda text: read_labels([text], ["a"]), "a:pool", "give ENTRY:LABEL=VALUE"),
        (lambda text: read_labels([text], ["a"]), "a:po ol=x", "give ENTRY:LABEL=VALUE"),
        (lambda text: read_labels([text], ["a"]), "b:pool=x", "has no nodes 'b'; it has a"),
        (lambda text: read_labels([text, text], ["a"]), "a:pool=x", "pool of a is given twice"),
        (lambda text: read_resources([text], ["a"]), "rdma=1", "give .ENTRY:.NAME=COUNT"),
        (lambda text: read_resources([text], ["a"]), "rdma/hca=0", "give .ENTRY:.NAME=COUNT"),
        (lambda text: read_resources([text], ["a"]), "rdma/hca=1.5", "give .ENTRY:.NAME=COUNT"),
        (lambda text: read_resources([text], ["a"]), "b:rdma/hca=1", "has no nodes 'b'"),
        (lambda text: read_resources([text], ["a"]), "nvidia.com/gpu=8", "the plan says how many GPUs"),
    ],
)
def test_options_that_say_nothing_are_refused(read, text, said):
    with pytest.raises(HexiError, match=said):
        read(text)


def test_names_too_long_for_a_pod_are_refused():
    chosen = Settings(form="job", image="x", name="n" * 55)
    with pytest.raises(HexiError, match=r"a pod would be called n+-h100-rack-1-1, 69 characters"):
        training_pods(plan_for(range(GPUS)), read_text(FLEET), chosen)


def test_entries_whose_names_kubernetes_takes_for_one_are_two_jobs():
    text = FLEET.replace("name: a100", "name: l40S")
    pods = training_pods(plan_for(range(GPUS)), read_text(text), settings())
    assert [kind.name for kind in pods.kinds] == ["h100-rack-1", "l40s", "l40s-x"]


def test_files_beyond_a_configmap_are_refused():
    pods = training_pods(plan_for(range(GPUS)), read_text(FLEET), settings())
    with pytest.raises(HexiError, match="a ConfigMap holds 1048576"):
        manifests(pods, {"plan.yaml": "x" * 2**20}, settings())


_RANK = """\
import os, sys
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(
    " ".join([*(os.environ[name] for name in names), seen, os.environ["JOB_COMPLETION_INDEX"], *sys.argv[2:]])
)
"""


def test_pods_start_their_ranks(forks, tmp_path):
    """Pods as processes of this machine: with addresses and the training replaced, torchrun numbers ranks."""
    (tmp_path / "rank.py").write_text(_RANK)
    out = tmp_path / "out"
    out.mkdir()
    pods = training_pods(plan_for([3, 0, 4, 6]), read_text(FLEET), settings())
    data = manifests(pods, {"job.args": f"{out} 'a  b'\n"}, settings())[0]["data"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    here = re.sub('--master-addr=[^"]+', "--master-addr=127.0.0.1", data["pods.json"]).replace("29500", port)
    table = json.loads(here)
    for one in (one for pods_ in table.values() for pod in pods_ for one in pod):
        assert one["words"][-2:] == ["-m", "megatron_hexi.pretrain_gpt"]
        one["words"][-2:] = [str(tmp_path / "rank.py")]
    (tmp_path / "pods.json").write_text(json.dumps(table))
    (tmp_path / "job.args").write_text(data["job.args"])
    starts = [
        subprocess.Popen(
            [forks.python, "-m", "megatron_hexi.kubernetes.start", str(tmp_path), kind],
            env={**os.environ, "JOB_COMPLETION_INDEX": str(index)},
        )
        for kind, pods_ in pods.commands.items()
        for index in range(len(pods_))
    ]
    assert [start.wait(120) for start in starts] == [0] * len(starts)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "0": "0 4 0 0 0 a  b",
        "1": "1 4 0 all 0 a  b",
        "2": "2 4 0 1 0 a  b",
        "3": "3 4 0 all 0 a  b",
    }


def test_the_first_process_that_fails_ends_the_pod():
    waits = ["-c", "import time; time.sleep(60)"]
    assert run_commands([(waits, {}), (["-c", "import sys; sys.exit(2)"], {})]) == 2
    assert run_commands([(["-c", "import os; os.kill(os.getpid(), 9)"], {}), (waits, {})]) == 137
    assert run_commands([(["-c", "pass"], {}), (["-c", "pass"], {})]) == 0


@pytest.mark.parametrize(
    ("table", "index"),
    [("{}", "0"), ('{"a": []}', "0"), ('{"a": [[]]}', "x"), ("[", "0"), ('{"a": [[1]]}', "0")],
)
def test_a_pod_without_commands_says_so(tmp_path, table, index):
    (tmp_path / "pods.json").write_text(table)
    with pytest.raises(HexiError, match="has no commands for pod"):
        find_commands(tmp_path, "a", index)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a cluster, a plan for all of it, and the job's arguments."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(FLEET)
    Path("job.args").write_text(MODEL)
    write_plan(proportional_plan(Workload(64, 4, 4, 16), [[[1] * GPUS]]), Path("plan.yaml"))
    return tmp_path


LAUNCH = "launch plan.yaml --cluster cluster.yaml --model job.args --kubernetes"


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_launch_writes_manifests(folder, monkeypatch, capsys, form):
    words = f"{LAUNCH} {form} --image hexi:1 --volume train:/train -o job.yaml -- --save /train/x"
    said = call_hexi(monkeypatch, capsys, [*words.split(), "--data-path", "/train/it's $HOME"])
    assert (said.code, said.err) == (0, "wrote job.yaml\n")
    specs, _, _ = read_back(Path("job.yaml").read_text())
    assert set(specs) == set(KINDS)
    data = next(yaml.safe_load_all(Path("job.yaml").read_text()))["data"]
    Path("back.yaml").write_text(data["plan.yaml"])
    Path("back.args").write_text(data["job.args"])
    assert read_plan("back.yaml") == read_plan("plan.yaml")
    given = read_words(Path("back.args"))
    assert given[:2] == ["--hexi-plan", "/etc/hexi/plan.yaml"]
    assert given[given.index("--data-path") + 1] == "/train/it's $HOME"
    assert given[-4:] == ["--load", "/train/x", "--ckpt-format", "torch_dist"]
    printed = call_hexi(monkeypatch, capsys, f"{LAUNCH} {form} --image hexi:1 --json".split())
    document = json.loads(printed.out)
    check_schema(document["manifests"])
    assert document["plan"] == "plan.yaml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{LAUNCH} job", "--image is missing; give the pods' image"),
        (f"{LAUNCH} pod --image x", "--kubernetes pod: is no form"),
        (f"{LAUNCH} job --image x --elastic 2", "such a job goes on from checkpoints; add -- --save /FOLDER"),
        (f"{LAUNCH} job --image x --restarts -1", "--restarts -1: give 0 to 1000"),
        (f"{LAUNCH} job --image x -o job.args", "job.args: would be overwritten"),
        (f"{LAUNCH} job --image x -o out.args", "YAML is written here, and the name ends as text"),
        (f"{LAUNCH} job --image x -- --save /a --load /b", "give --pretrained-checkpoint /b instead"),
        (f"{LAUNCH} job --image x -- --save /a --finetune", "--finetune begins again at iteration 0"),
        (f"{LAUNCH[:-13]} --image x", "--image: belongs to --kubernetes job|jobset"),
        ("launch-probe cluster.yaml --image x -- -o /w/c.yaml", "is lost with its pod"),
        ("launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c.yaml --heads x", "not a whole number"),
        ("launch-probe cluster.yaml --image x --volume a:/w -- --quick", "--out"),
    ],
)
def test_commands_that_would_not_run_are_refused(folder, monkeypatch, capsys, words, said):
    found = call_hexi(monkeypatch, capsys, words.split())
    assert found.code == 2
    assert said in found.err
    assert is_one_error_line(
        found.err.removeprefix("note: without --save a job that starts again begins anew\n")
    )


def test_launch_probe_writes_manifests(folder, monkeypatch, capsys):
    words = "launch-probe cluster.yaml --image x --volume a:/w -o probe.yaml -- -o /w/c.yaml --heads 4"
    assert call_hexi(monkeypatch, capsys, words.split()).code == 0
    objects = list(yaml.safe_load_all(Path("probe.yaml").read_text()))
    check_schema(objects)
    assert [one["kind"] for one in objects] == ["ConfigMap", "Service", "Job", "Job", "Job"]
    assert all(one["spec"]["backoffLimit"] == 0 for one in objects[2:])
