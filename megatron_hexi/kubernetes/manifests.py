"""The objects of a job: ConfigMap and Service, and a Job for each kind of pod, or one JobSet of them.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/. Nodes are chosen by labels of NVIDIA's
gpu-feature-discovery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.pods import STORE, PodKind, Pods
from megatron_hexi.kubernetes.settings import FOLDER, SHARED_MEMORY, Settings, check_host_names

#: https://github.com/NVIDIA/k8s-device-plugin/tree/main/docs/gpu-feature-discovery: the driver's name of the
#: GPU, with dashes for blanks.
PRODUCT_LABEL = "nvidia.com/gpu.product"

# Names as the driver has them (https://github.com/NVIDIA/open-gpu-kernel-modules, README.md). Drivers before
# 470 leave the vendor out.
_DRIVER_NAMES = {
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "H100-SXM-80GB": "H100-80GB-HBM3",
    "H200-SXM-141GB": "H200",
    "B200-180GB": "B200",
    "GH200-96GB": "GH200-480GB",
    "H100-NVL-94GB": "H100-NVL",
    "H100-PCIe-80GB": "H100-PCIe",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100-PCIe-80GB": "A100-80GB-PCIe",
    "A800-SXM-80GB": "A800-SXM4-80GB",
    "L40S-48GB": "L40S",
    "L40-48GB": "L40",
    "L4-24GB": "L4",
    "A6000-48GB": "RTX-A6000",
    "A10G-24GB": "A10G",
    "RTX4090-24GB": "GeForce-RTX-4090",
    "RTX3090-24GB": "GeForce-RTX-3090",
    "RTX3080Ti-12GB": "GeForce-RTX-3080-Ti",
    "RTX2080Ti-11GB": "GeForce-RTX-2080-Ti",
}
_TESLA_NAMES = {
    "V100-SXM2-16GB": "Tesla-V100-SXM2-16GB",
    "V100-SXM2-32GB": "Tesla-V100-SXM2-32GB",
    "V100-PCIe-16GB": "Tesla-V100-PCIE-16GB",
    "T4-16GB": "Tesla-T4",
    "TitanRTX-24GB": "TITAN-RTX",
}


def product_labels(gpu: str) -> tuple[str, ...]:
    """Return the values of `PRODUCT_LABEL` that a GPU of the catalogue may have; empty: none is known.

    >>> product_labels("H100-SXM-80GB")
    ('NVIDIA-H100-80GB-HBM3', 'H100-80GB-HBM3')
    """
    if name := _TESLA_NAMES.get(gpu):
        return (name, f"NVIDIA-{name}")
    name = _DRIVER_NAMES.get(gpu)
    return (f"NVIDIA-{name}", name) if name else ()


#: Largest size of a ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/.
MAX_FILES_BYTES = 2**20
#: The variable that `megatron_hexi.elastic` reads the job's secret from, and its key in a Secret.
SECRET_VARIABLE, SECRET_KEY = "HEXI_SECRET", "secret"
#: Exit code of wrong input, which another start would not mend (`errors.EXIT_USER_ERROR`).
_WRONG_INPUT = 2
#: An elastic job replaces a lost pod for as long as it runs; Kubernetes counts up to here.
_ANY_NUMBER = 2**31 - 1
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"


def manifests(pods: Pods, files: Mapping[str, str], settings: Settings) -> list[dict[str, Any]]:
    """Return all objects of a job, in the order to apply them.

    Args:
        files: texts of the files that pods find in `FOLDER` besides their commands, by file name.
    """
    data = {**files, "pods.json": json.dumps(pods.table(), indent=1)}
    size = sum(len(name) + len(text.encode()) for name, text in data.items())
    if size > MAX_FILES_BYTES:
        raise HexiError(
            f"--kubernetes {settings.form}: plan, arguments and commands are {size} bytes, and a ConfigMap "
            f"holds {MAX_FILES_BYTES}; start this plan by the lines of hexi launch without --kubernetes"
        )
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", **_head(settings.name, settings), "data": data}]
    specs = {kind.name: _job(kind, settings) for kind in pods.kinds}
    if settings.form == "jobset":
        return [*objects, _jobset(specs, settings)]
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", **_head(f"{settings.name}-{name}", settings), "spec": spec}
        for name, spec in specs.items()
    ]
    return [*objects, _service(settings), *jobs]


def secret_name(settings: Settings) -> str:
    """Return the name of the Secret by which an elastic job's nodes know each other; the user creates it."""
    return f"{settings.name}-secret"


def manifests_text(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return the objects as YAML documents, which ``kubectl apply -f`` takes."""
    return yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, width=110, explicit_start=True)


class _ManifestDumper(yaml.SafeDumper):
    """Dumps texts in quotes, or as a block of lines, and no aliases.

    Of ``1e3``, ``0o17`` and ``y``, which PyYAML would leave plain, kubectl makes 1000, 15 and true.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if _FIELD.fullmatch(key.value):
                key.style = None
        return node


#: Keys that PyYAML quotes where a reader would take them for more than text: neither ``y`` nor numbers.
_FIELD = re.compile(r"[A-Za-z]\S+")


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_ManifestDumper.add_representer(str, _text)


def _head(name: str, settings: Settings) -> dict[str, Any]:
    space = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {"metadata": {"name": name, **space, "labels": _labels(settings)}}


def _labels(settings: Settings) -> dict[str, str]:
    return {"app.kubernetes.io/name": "megatron-hexi", _INSTANCE: settings.name}


def _service(settings: Settings) -> dict[str, Any]:
    """Return the headless Service that gives each pod a host name, also before the pod counts as ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_INSTANCE: settings.name}}
    return {"apiVersion": "v1", "kind": "Service", **_head(settings.name, settings), "spec": spec}


def _jobset(specs: Mapping[str, Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return one JobSet of all jobs: when a job fails all start again, unless its input was wrong."""
    wrong_input = {"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": settings.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.restarts, "rules": [wrong_input]},
        "replicatedJobs": [
            {"name": name, "replicas": 1, "template": {"spec": spec}} for name, spec in specs.items()
        ],
    }
    if STORE in specs and settings.least is not None:  # it never ends by itself
        trains = [name for name in specs if name != STORE]
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": trains}
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return {**kind, **_head(settings.name, settings), "spec": spec}


def _job(kind: PodKind, settings: Settings) -> dict[str, Any]:
    """Return the spec of an Indexed Job with one pod for each node of a kind."""
    count = len(kind.nodes)
    failures = 0 if settings.form == "jobset" else settings.restarts * count
    if settings.least is not None:
        failures = _ANY_NUMBER
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": failures,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_WRONG_INPUT]}},
                # A pod that was drained or preempted says nothing against the job.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": {**_labels(settings), _COMPONENT: _component(kind)}},
            "spec": _pod(kind, settings),
        },
    }


def _component(kind: PodKind) -> str:
    return STORE if kind.entry is None else "ranks"


def _pod(kind: PodKind, settings: Settings) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "hexi", "configMap": {"name": settings.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "hexi", "mountPath": str(FOLDER), "readOnly": True},
        {"name": "shared-memory", "mountPath": str(SHARED_MEMORY)},
    ]
    for number, volume in enumerate(settings.volumes):
        source = (
            {"persistentVolumeClaim": {"claimName": volume.source}}
            if volume.is_claim
            else {"hostPath": {"path": volume.source, "type": "Directory"}}
        )
        volumes.append({"name": f"volume-{number}", **source})
        read_only = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": f"volume-{number}", "mountPath": str(volume.path), **read_only})
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    variables: list[dict[str, Any]] = [{"name": "HEXI_HOST", "valueFrom": node_name}]
    if settings.least is not None:
        secret = {"name": secret_name(settings), "key": SECRET_KEY}
        variables.append({"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": secret}})
    container: dict[str, Any] = {
        "name": "hexi",
        "image": settings.image,
        "command": ["python", "-m", "megatron_hexi.kubernetes.start", str(FOLDER), kind.name],
        "env": variables,
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "subdomain": settings.name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
    }
    if kind.entry is None:
        return spec
    resources = settings.resources_of(kind.entry)
    container["resources"] = {"limits": {"nvidia.com/gpu": str(kind.gpus), **resources}}
    if any("/" in name for name in resources):  # RDMA registers memory, which it must be allowed to lock
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    # Two pods on one node would share resources that the plan counts for each.
    others = {_INSTANCE: settings.name, _COMPONENT: _component(kind)}
    apart = {"labelSelector": {"matchLabels": others}, "topologyKey": "kubernetes.io/hostname"}
    return spec | {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": _node_terms(kind, settings)}]
                }
            },
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
        },
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }


def _node_terms(kind: PodKind, settings: Settings) -> list[dict[str, Any]]:
    """Return the node selector terms of a kind's pods, by the user's labels, else host names, else GPU."""
    entry = kind.entry or ""
    labels: dict[str, Sequence[str]]
    if entry in settings.labels:
        labels = {key: [value] for key, value in settings.labels[entry].items()}
    elif kind.hosts:
        check_host_names(entry, kind.hosts)
        labels = {"kubernetes.io/hostname": kind.hosts}
    elif products := product_labels(kind.gpu):
        labels = {PRODUCT_LABEL: products}
    else:
        raise HexiError(
            f"nodes {entry}: the label of a {kind.gpu} in Kubernetes is not known; give "
            f"--node-label {entry}:LABEL=VALUE (kubectl get nodes -L {PRODUCT_LABEL})"
        )
    return [{"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()]
