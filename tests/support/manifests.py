"""A fleet, plans for it, and what Kubernetes checks of manifests."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from ruamel.yaml import YAML

from megatron_hexi.kubernetes.settings import Settings
from megatron_hexi.plan import Workload, proportional_plan

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
    """Fail where Kubernetes would refuse the objects."""
    for document in objects:
        if document["kind"] != "JobSet":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            continue
        jsonschema.validate(document["spec"], JOBSET)
        for one in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **one["template"]}
            kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def as_readers_see(text):
    """The objects that YAML 1.1 and YAML 1.2 read, which must be the same.

    A text must be quoted, or a block: what a third reader makes of a plain one (``1e3``, ``0o17``, ``y``; the
    rules of Go's yaml.v2 are neither version's) is not known.
    """
    seen = []
    for version in ("1.1", "1.2"):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        seen.append(list(reader.load_all(text)))
    assert seen[0] == seen[1]
    events = [event for event in yaml.parse(text) if isinstance(event, yaml.ScalarEvent)]
    plain = {event.value for event in events if event.style is None}
    assert all(re.fullmatch(r"true|false|[0-9]+|[A-Za-z]\S+", value) for value in plain), plain
    return seen[0]


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
