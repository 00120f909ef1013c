"""Settings of manifests: what Kubernetes or the job would refuse is refused before."""

from __future__ import annotations

import pytest

from megatron_hexi.cluster import catalog
from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.manifests import manifests, product_labels
from megatron_hexi.kubernetes.pods import training_pods
from megatron_hexi.kubernetes.settings import Settings, read_labels, read_resources, read_volume
from megatron_hexi.slurm.nodes import names_gpu
from tests.support.fleets import read_text
from tests.support.manifests import FLEET, GPUS, plan_for, settings

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
        ({"form": "trainjob"}, "--kubernetes trainjob: not known; give job or jobset"),
        ({"image": "a b"}, "--image a b: not an image's name"),
        ({"image": "x; rm -rf /"}, "not an image's name"),
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
        (read_volume, "Work:/a", "'Work' cannot name a PersistentVolumeClaim"),
        (read_volume, "/a\nb:/c", "give a folder of the nodes below /"),
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
