"""``hexi doctor``: one document, one verdict, and a word where something is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_hexi.cli import doctor
from megatron_hexi.doctor.findings import doctor_dict, doctor_report
from megatron_hexi.doctor.gather import LaunchedJob, find_job
from megatron_hexi.doctor.rules import find_job_problems
from megatron_hexi.errors import HexiError
from tests.support.shell import call_hexi, is_one_error_line
from tests.unit.doctor.test_job_problems import a_job, with_nccl
from tests.unit.doctor.test_rules import a_node, with_variables

# What a launcher of this test run, or the machine, has set would be the doctor's business too.
_STEERING = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "WORLD_SIZE")


@pytest.fixture
def hexi(monkeypatch, capsys):
    for name in _STEERING:
        monkeypatch.delenv(name, raising=False)
    return lambda *words: call_hexi(monkeypatch, capsys, words)


def test_json_is_one_document(hexi):
    result = hexi("doctor", "--json")
    document = json.loads(result.out)
    assert list(document) == ["healthy", "problems", "ranks"]
    (facts,) = document["ranks"]
    assert {package["name"] for package in facts["packages"]} > {"torch", "megatron-core", "ortools"}
    assert (result.code, result.err) == (0 if document["healthy"] else 2, "")


def test_an_error_is_code_2_and_stands_in_the_report(hexi, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch")
    result = hexi("doctor")
    assert (result.code, result.err) == (2, "")
    assert "NCCL_SOCKET_IFNAME=nosuch" in result.out
    assert "not healthy" in result.out


def test_a_folder_that_is_no_checkout(hexi, tmp_path):
    document = json.loads(hexi("doctor", "--json", "--megatron", tmp_path).out)
    (facts,) = document["ranks"]
    assert facts["checkout"]["state"] == "unknown"
    assert any("pretrain_gpt.py: not there" in problem["what"] for problem in document["problems"])


def test_the_state_of_a_checkout(monkeypatch, tmp_path):
    for patched, state in ((True, "patched"), (False, "not patched")):
        monkeypatch.setattr(doctor, "checkout_is_patched", lambda checkout, patched=patched: patched)
        found = doctor._look_at(tmp_path)
        assert found is not None
        assert found.state == state


WITHOUT = """
import importlib.util, sys
missing = sys.argv.pop(1)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
spec_of = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == missing else spec_of(name, package)
)
sys.argv[0] = "hexi"
from megatron_hexi.cli.main import main
main()
"""


@pytest.mark.parametrize(("missing", "package"), [("torch", "torch"), ("megatron", "megatron-core")])
def test_it_works_where_a_package_is_missing_and_says_so(missing, package):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    document = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (2, "")
    errors = [problem for problem in document["problems"] if problem["severity"] == "error"]
    assert [problem["what"] for problem in errors] == [f"{package} is not installed"]
    assert errors[0]["remedy"].startswith(f"pip install '{package}")


def test_help_imports_neither_torch_nor_the_doctor():
    program = (
        "import sys; from megatron_hexi.cli import main; "
        "print({'torch', 'megatron_hexi.doctor'} & {*sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True
    )
    assert run.stdout == "set()\n"


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_the_launcher_s_job():
    assert find_job(TORCHRUN) == LaunchedJob(1, 4, "h", 29500, True, "2")
    assert find_job({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert find_job({}) is None


@pytest.mark.parametrize(
    "wrong", [{"RANK": "x"}, {"RANK": "4"}, {"MASTER_PORT": ""}, {"MASTER_ADDR": ""}], ids=str
)
def test_a_launcher_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(HexiError, match="start with torchrun or srun, which set"):
        find_job(TORCHRUN | wrong)


def test_a_wrong_launcher_is_one_line(hexi, monkeypatch):
    monkeypatch.setattr(
        "megatron_hexi.doctor.gather.find_job",
        lambda environment: find_job({"RANK": "x", "WORLD_SIZE": "2"}),
    )
    result = hexi("doctor")
    assert result.code == 2
    assert is_one_error_line(result.err)


def test_local_does_not_look_for_other_ranks(hexi, monkeypatch):
    for name, value in TORCHRUN.items():
        if name != "RANK":
            monkeypatch.setenv(name, value)
    assert json.loads(hexi("doctor", "--local", "--json").out)["ranks"]


def printed(report):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    Console(file=out, width=160).print(report)
    return out.getvalue()


def test_the_report_of_a_job_has_a_column_a_kind_of_node():
    facts = a_job({"a": a_node(), "b": with_nccl(a_node(), "2.26.2"), "c": a_node()})
    problems = find_job_problems(facts)
    text = printed(doctor_report(facts, problems))
    assert "a (rank 0-1), c (rank 4-5)" in text
    assert "NCCL differs" in text
    assert text.startswith("not healthy: 1 error\n")
    assert [rank["rank"] for rank in doctor_dict(facts, problems)["ranks"]] == [0, 1, 2, 3, 4, 5]


def test_the_report_of_a_healthy_node_says_so():
    text = printed(doctor_report([a_node()], []))
    assert "8 x NVIDIA H100 80GB HBM3 80 GiB" in text
    assert "flash-attn-3" in text
    assert "mlx5_0:1" in text
    assert text.startswith("healthy: nothing found\n")


def test_what_a_machine_says_is_not_taken_for_markup():
    text = printed(doctor_report([with_variables(a_node(), NCCL_DEBUG_FILE="[red]x[/red]")], []))
    assert "[red]x[/red]" in text
