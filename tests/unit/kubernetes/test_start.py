"""The command of a pod: it starts its ranks, and ends as they do."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.manifests import manifests
from megatron_hexi.kubernetes.pods import training_pods
from megatron_hexi.kubernetes.start import find_commands, run_commands
from megatron_hexi.lab.testbed.job import free_port
from tests.support.fleets import read_text
from tests.support.manifests import FLEET, plan_for, settings

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
    here = re.sub('--master-addr=[^"]+', "--master-addr=127.0.0.1", data["pods.json"])
    here = here.replace("29500", str(free_port()))
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
    assert [start.wait(250) for start in starts] == [0] * len(starts)
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
    [
        *(("{}", "0"), ('{"a": []}', "0"), ('{"a": [[]]}', "x"), ("[", "0"), ('{"a": [[1]]}', "0")),
        *(('{"a": [[]]}', "-1"), ('{"a": [[]]}', "\u0660"), ('{"a":' * 50_000, "0"), ("[" * 50_000, "0")),
    ],
)
def test_a_pod_without_commands_says_so(tmp_path, table, index):
    (tmp_path / "pods.json").write_text(table)
    with pytest.raises(HexiError, match="has no commands for pod"):
        find_commands(tmp_path, "a", index)
