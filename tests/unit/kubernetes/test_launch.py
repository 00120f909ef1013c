"""`hexi launch --kubernetes` and `hexi launch-probe`: what they write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_hexi.argument_file import read_words
from megatron_hexi.plan import Workload, proportional_plan, read_plan, write_plan
from tests.support.manifests import FLEET, GPUS, KINDS, MODEL, check_schema, read_back
from tests.support.shell import call_hexi, is_one_error_line


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
    made_up = "note: made up for a trial: --lr 1e-4, --train-iters 10; give your own"
    assert said.code == 0
    assert said.err == f"wrote job.yaml\n{made_up}\nnote: not given: --tokenizer-type\n"
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
        (f"{LAUNCH} pod --image x", "--kubernetes pod: not known"),
        (f"{LAUNCH} job --image x --elastic 2", "needs checkpoints to go on from; add -- --save /FOLDER"),
        (
            f"{LAUNCH} job --image x --spare a100-0",
            "--spare a100-0: only elastic jobs have spares; add --elastic",
        ),
        (f"{LAUNCH} job --image x --restarts -1", "--restarts -1: give 0 to 1000"),
        (f"{LAUNCH} job --image x -o job.args", "job.args: this command reads or writes"),
        (f"{LAUNCH} job --image x -o out.args", "the file is to be YAML, but its name ends as that of text"),
        (f"{LAUNCH} job --image x -- --save /a --load /b", "give --pretrained-checkpoint /b instead"),
        (f"{LAUNCH} job --image x -- --save /a --finetune", "--finetune begins again at iteration 0"),
        (f"{LAUNCH[:-13]} --image x", "--image: works with --kubernetes only"),
        ("launch-probe cluster.yaml --image x -- -o /w/c.yaml", "is lost with the pod"),
        ("launch-probe cluster.yaml --image x --volume a:/w -- -o /w/../etc/c.yaml", "is lost with the pod"),
        (
            "launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c --budget -5",
            "--budget -5: is out of",
        ),
        ("launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c --budget nan", "--budget nan: is out"),
        (
            "launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c --hidden-size 0",
            "--hidden-size 0: is out",
        ),
        (
            "launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c --precision x",
            "--precision x: unknown precision",
        ),
        ("launch-probe cluster.yaml --image x --volume a:/w -- -o /w/c.yaml --heads x", "not a whole number"),
        ("launch-probe cluster.yaml --image x --volume a:/w -- --quick", "--out"),
    ],
)
def test_commands_that_would_not_run_are_refused(folder, monkeypatch, capsys, words, said):
    found = call_hexi(monkeypatch, capsys, words.split())
    assert found.code == 2
    assert said in found.err
    assert is_one_error_line(
        found.err.removeprefix("note: without --save a job that starts again begins at iteration 0\n")
    )


def test_launch_probe_writes_manifests(folder, monkeypatch, capsys):
    words = "launch-probe cluster.yaml --image x --volume a:/w -o probe.yaml -- -o /w/c.yaml --heads 4"
    assert call_hexi(monkeypatch, capsys, words.split()).code == 0
    objects = list(yaml.safe_load_all(Path("probe.yaml").read_text()))
    check_schema(objects)
    assert [one["kind"] for one in objects] == ["ConfigMap", "Service", "Job", "Job", "Job"]
    assert all(one["spec"]["backoffLimit"] == 0 for one in objects[2:])
