"""`hexi probe` as it is started: torchrun, two agents for two nodes, gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.lab.testbed.job import free_port
from tests.megatron.launch import environment

#: A few seconds' worth.
SHORT = ("--quick", "--budget", "0.2", "--precision", "fp32", "--hidden-size", "128")
_LIMIT_S = 150


def start(forks, folder, *words, nodes=2, ranks=2, python=None):
    """Agents of one job, one a node; they are forked unless an interpreter is given, and the ranks always."""
    port = free_port()
    return [
        subprocess.Popen(
            [
                *(
                    python or forks.python,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    str(nodes),
                    "--node-rank",
                    str(node),
                ),
                *("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("-m", "megatron_hexi.cli.main", "probe", *words),
            ],
            cwd=folder,
            env=environment() | {"PYTHON_EXEC": str(forks.python)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]


def finish(agents):
    """Exit codes, and what all printed."""
    try:
        said = [agent.communicate(timeout=_LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [agent.returncode for agent in agents], [out for out, _ in said], "".join(err for _, err in said)


def errors_in(text):
    return [line for line in text.splitlines() if line.startswith("hexi: error: ")]


def test_two_nodes_of_two_ranks_give_a_file_that_hexi_plan_takes(forks, tmp_path):
    codes, outs, err = finish(start(forks, tmp_path, "-o", "out.yaml", *SHORT, "--json"))
    assert codes == [0, 0], err
    cluster = read_cluster(tmp_path / "out.yaml")
    assert [list(node.ranks) for node in cluster.nodes] == [[0, 1], [2, 3]]
    assert cluster.bandwidth(0, 1) > 0
    assert cluster.bandwidth(1, 2) > 0
    documents = [json.loads(out) for out in outs if out.strip()]
    assert len(documents) == 1  # rank 0's alone
    measured = documents[0]
    assert len(measured["inside"]) == 2
    assert [(pair["src"], pair["dst"]) for pair in measured["between"]] == [(0, 1), (1, 0)]
    assert all(pair["one_rank"] for pair in measured["between"])
    assert all(len(series["tflops"]) == 4 for series in measured["curves"].values())
    assert measured["together"]["seconds"][-1] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.yaml"]
    model = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(model | {"model_type": "llama", "vocab_size": 512}))
    job = ("--model", "config.json", "--seq-length", "2048", "--precision", "fp32", "-o", "plan.yaml")
    planned = subprocess.run(
        [forks.python, "-m", "megatron_hexi.cli.main", "plan", "out.yaml", *job],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert planned.returncode == 0, planned.stderr
    assert (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "out.yaml", "--kernel", "nosuch"), "kernel nosuch: there is none of that name"),
        (("-o", "missing/out.yaml"), "the folder missing is not there"),
    ],
)
def test_a_mistake_is_said_once(forks, tmp_path, words, said):
    _, _, err = finish(start(forks, tmp_path, *words, *SHORT, nodes=1))
    (line,) = errors_in(err)
    assert said in line
    assert list(tmp_path.iterdir()) == []


def rank_process(agent, rank):
    """The process of a rank among an agent's children."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for child in map(int, children):
        if f"RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes().replace(b"GROUP_", b"#"):
            return child
    raise AssertionError(f"no rank {rank} among {children}")


def test_a_rank_that_dies_ends_all_and_what_was_measured_is_kept(forks, tmp_path):
    agents = start(forks, tmp_path, "-o", "out.yaml", *SHORT, nodes=1, python=sys.executable)
    kept = tmp_path / "out.yaml.partial.json"
    deadline = time.monotonic() + _LIMIT_S
    while not kept.exists():
        assert time.monotonic() < deadline
        assert agents[0].poll() is None
        time.sleep(0.05)
    os.kill(rank_process(agents[0], 1), signal.SIGKILL)
    codes, _, err = finish(agents)
    assert codes != [0]
    # torchrun may end rank 0 before it has noticed.
    assert len(errors_in(err)) <= 1
    assert all("a rank no longer answers" in line for line in errors_in(err))
    first = json.loads(kept.read_text())
    codes, outs, err = finish(start(forks, tmp_path, "-o", "out.yaml", *SHORT, "--json", nodes=1))
    assert codes == [0], err
    assert "1 of 5: memory" not in err
    assert json.loads(outs[0])["usable_bytes"] == first["usable_bytes"]
    assert not kept.exists()
