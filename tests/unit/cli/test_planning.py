"""`hexi plan` and `compare` with a planner that does not search: what they print, write and draw."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_hexi import planner
from megatron_hexi.cli import main as cli
from megatron_hexi.cli import output
from megatron_hexi.cli.output import PICTURE_FORMATS, check_outputs, progress_bar
from megatron_hexi.cluster import PlannerRules
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.plan import plan_digest, read_plan
from megatron_hexi.planner import CHOSEN
from tests.support.shell import is_one_error_line
from tests.unit.cli.conftest import ARGUMENTS, JOB


def test_plan_writes_the_plan_and_reports(hexi, asked):
    code, out, err = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml")
    assert (code, err) == (0, "wrote plan.yaml\n")
    plan = read_plan("plan.yaml")
    assert (plan.units, plan.workload.seq_length) == (8, 16384)
    for words in (
        "gpt-3b, 16,384 tokens",
        "tokens/s",
        "lower bound",
        "4 x H100-SXM-80GB",
        "note: it was made up",
    ):
        assert words in out


def test_rates_are_written_where_they_are_asked_for(hexi, asked):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml")[0] == 0
    assert read_plan("plan.yaml").rates is None
    assert hexi("plan", "cluster.yaml", *JOB, "--batch-shares", "-o", "rated.yaml")[0] == 0
    rated = read_plan("rated.yaml")
    assert rated.rates is not None
    assert len(rated.rates.room) == 8
    assert rated.rates.row_s[0] < rated.rates.row_s[4]
    assert plan_digest(rated) != plan_digest(read_plan("plan.yaml")), "ranks deal by them"


def test_plan_as_json_is_one_document(hexi, asked):
    code, out, err = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "wrote plan.yaml\n")
    assert (document["plan"], document["cluster"]) == ("plan.yaml", "cluster.yaml")
    assert document["digest"] == plan_digest(read_plan("plan.yaml"))
    assert document["job"]["model"] == "gpt-3b"
    assert document["job"]["recompute"] == "full"
    assert document["notes"][-1] == "it was made up"
    assert len(document["memory_gib"]) == 8
    told = read_plan("plan.yaml").estimate
    assert told
    assert document["iteration_s"] == told.iteration_s


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_batch_that_nobody_gave_is_noted_with_what_to_type(hexi, asked, command):
    out = ("-o", "plan.yaml") if command == "plan" else ()
    note = "note: --global-batch-size is not given: planned for 8 sequences per iteration"
    said = " ".join(hexi(command, "cluster.yaml", *JOB, *out).out.split())
    assert note in said
    assert "such as --global-batch-size 64" in said
    Path("job.args").write_text(ARGUMENTS)  # has one
    for given in ([*JOB, "--global-batch-size", 8], ["--model", "job.args"]):
        result = hexi(command, "cluster.yaml", *given, *out)
        assert result.code == 0
        assert "--global-batch-size is not given" not in " ".join(result.out.split())


def test_features_and_the_context_parallel_size_reach_the_planner(hexi, asked):
    words = ("--no-offload", "--unequal-replicas", "--context-parallel-size", 2)
    assert hexi("plan", "cluster.yaml", *JOB, *words, "-o", "plan.yaml").code == 0
    ((request, *_),) = asked
    assert request.rules == PlannerRules(offload=False, unequal_replicas=True)
    assert request.context_parallel == 2
    assert request.virtual_stages is None
    assert request.fixed == {"recompute"}


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_faster_or_a_simpler_plan_is_asked_for(hexi, asked, command):
    out = ("-o", "plan.yaml") if command == "plan" else ()
    for flag in ("--fastest", "--simplest"):
        assert hexi(command, "cluster.yaml", *JOB, *out, flag).code == 0
    assert [within for *_, within in asked] == [0.0, 0.05]
    both = hexi(command, "cluster.yaml", *JOB, *out, "--fastest", "--simplest")
    assert (both.code, len(asked)) == (2, 2)
    assert "leave one of them out" in both.err


def test_chunks_of_a_stage_reach_the_planner(hexi, asked):
    words = ("--num-virtual-stages-per-pipeline-rank", 2)
    assert hexi("plan", "cluster.yaml", *JOB, *words, "-o", "plan.yaml").code == 0
    ((request, *_),) = asked
    assert (request.virtual_stages, request.job.virtual_stages) == (2, 1)
    assert request.rules == PlannerRules(unequal_stages=False)


def test_every_option_reaches_the_planner(hexi, asked):
    words = {
        "--micro-batch-size": ("micro_batch_size", 2),
        "--global-batch-size": ("global_batch_size", 12),
        "--tensor-model-parallel-size": ("tensor_parallel", 1),
        "--pipeline-model-parallel-size": ("pipeline_parallel", 1),
        "--recompute-granularity": ("recompute", "selective"),
        "--precision": ("precision", "fp16"),
        "--kernel": ("kernel", "flash-attn-2"),
    }
    given = [word for name, (_, value) in words.items() for word in (name, value)]
    flags = ["--no-use-distributed-optimizer", "--no-overlap-grad-reduce", "--no-sequence-parallel"]
    assert hexi("compare", "cluster.yaml", *JOB, *given, *flags, "--data-parallel-size", "auto").code == 0
    ((request, with_baselines, progress, _),) = asked
    job = request.job
    assert request.fixed == set(CHOSEN) - {"data_parallel"}
    assert {field: getattr(job, field) for field, _ in words.values()} == dict(words.values())
    assert (job.model.name, job.seq_length) == ("gpt-3b", 16384)
    switches = job.distributed_optimizer, job.overlap_gradients, job.sequence_parallel
    assert switches == (False, False, False)
    assert with_baselines
    assert progress


def test_defaults(hexi, asked):
    assert (
        hexi("plan", "cluster.yaml", "--model", "gpt-3b", "--seq-length", 4096, "-o", "plan.yaml").code == 0
    )
    ((request, with_baselines, _, within),) = asked
    job = request.job
    assert (request.fixed, with_baselines, within) == (frozenset(), False, 0.01)
    assert (job.micro_batch_size, job.global_batch_size, job.recompute, job.precision) == (
        1,
        8,
        "none",
        "bf16",
    )
    assert job.distributed_optimizer
    assert job.overlap_gradients
    assert job.sequence_parallel


def test_data_parallel_as_a_number(hexi, asked):
    assert hexi("compare", "cluster.yaml", *JOB, "--data-parallel-size", "2").code == 0
    request = asked[0][0]
    assert request.job.data_parallel == 2
    assert request.fixed == {"recompute", "data_parallel"}


def test_compare_reports_every_baseline(hexi, asked):
    code, out, err = hexi("compare", "cluster.yaml", *JOB, "--picture", "out.png")
    assert (code, err) == (0, "drew out.png\n")
    for words in ("hexi", "ring", "1.00x", "ulysses", "ceiling"):
        assert words in out
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_compare_as_json(hexi, asked):
    code, out, err = hexi("compare", "cluster.yaml", *JOB, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert [(one["name"], one["why_not"]) for one in document["results"]] == [
        ("hexi", None),
        ("ring", None),
        ("ulysses", "no"),
    ]
    assert document["results"][2]["tokens_per_s"] is None
    assert document["plan"]["tokens_per_s"] == document["results"][0]["tokens_per_s"]


def test_plan_draws_who_holds_what(hexi, asked):
    result = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--picture", "plan.svg")
    assert (result.code, result.err) == (0, "wrote plan.yaml\ndrew plan.svg\n")
    assert "<svg" in Path("plan.svg").read_text()


def test_no_plan_fits_is_code_3_and_writes_nothing(hexi, folder, monkeypatch):
    def find_plan(*_, **__):
        raise NothingFitsError("no plan fits: 3 GiB short")

    monkeypatch.setattr(planner, "find_plan", find_plan)
    words = ("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--picture", "plan.png", "--json")
    result = hexi(*words)
    assert (result.code, result.err) == (3, "hexi: error: no plan fits: 3 GiB short\n")
    assert json.loads(result.out) == {"error": "no plan fits: 3 GiB short", "exit_code": 3}
    assert [path.name for path in folder.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize(
    "words", [("-o", "absent/plan.yaml"), ("-o", "p.yaml", "--picture", "p.xyz"), ("-o", "cluster.yaml")]
)
def test_an_output_that_cannot_be_is_refused_before_planning(hexi, asked, words):
    assert hexi("plan", "cluster.yaml", *JOB, *words).code == 2
    assert asked == []


def test_plans_that_were_timed_are_written_also_where_none_fits(hexi, asked, monkeypatch):
    words = ("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--tried", "tried.csv")
    result = hexi(*words)
    assert (result.code, result.err) == (0, "wrote tried.csv\nwrote plan.yaml\n")
    (row,) = csv.DictReader(Path("tried.csv").read_text().splitlines())
    assert (row["step"], row["means"]) == ("a step", "unequal shares of sequences")
    assert row["stages"] == ("1 x (32 layers on 4 H100-SXM-80GB + 4 A100-SXM-80GB, TP 1, recompute full)")

    def find_plan(*_, **__):
        raise NothingFitsError("no plan fits")

    monkeypatch.setattr(planner, "find_plan", find_plan)
    assert hexi(*words).code == 3
    assert list(csv.DictReader(Path("tried.csv").read_text().splitlines())) == []


def test_a_failed_planner_leaves_an_old_plan_alone(hexi, folder, monkeypatch):
    Path("plan.yaml").write_text("old")

    def find_plan(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(planner, "find_plan", find_plan)
    monkeypatch.setattr(sys, "argv", ["hexi", "plan", "cluster.yaml", *map(str, JOB), "-o", "plan.yaml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()
    assert Path("plan.yaml").read_text() == "old"


def test_interrupted_is_code_130_without_a_traceback(hexi, monkeypatch):
    def find_plan(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "find_plan", find_plan)
    result = hexi("compare", "cluster.yaml", *JOB)
    assert result.code == 130
    assert "Traceback" not in result.err


def test_matplotlib_draws_every_known_picture_format():
    from matplotlib.figure import Figure

    assert set(PICTURE_FORMATS) <= set(Figure().canvas.get_supported_filetypes())


def test_a_picture_is_written_whole_or_not_at_all(folder, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    Path("out.png").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    from matplotlib.figure import Figure

    with pytest.raises(HexiError, match=r"out.png: cannot be written \(No space left on device\)"):
        output.write_picture(Figure(), Path("out.png"))
    assert Path("out.png").read_text() == "old"
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.yaml", "out.png"]


def test_a_closed_folder_is_refused(folder, monkeypatch):
    def closed(path, *_):
        raise PermissionError(13, "Permission denied", path)

    Path("closed").mkdir(mode=0o500)
    monkeypatch.setattr(os, "open", closed)  # root may write anywhere
    with pytest.raises(HexiError, match=r"the folder closed cannot be written to \(Permission denied\)"):
        check_outputs([], [Path("closed/plan.yaml")], None)


def test_a_file_gets_a_line_now_and_then_also_during_a_long_step(monkeypatch, capsys):
    monkeypatch.setattr(output, "_LINE_S", 0.05)
    with progress_bar() as tell:
        time.sleep(0.07)  # nothing is said yet, so nothing is repeated
        tell("trying layouts", 1000, 4000)
        time.sleep(0.2)
    lines = capsys.readouterr()
    said = lines.err.splitlines()
    assert len(said) >= 2
    assert set(said) == {"trying layouts: 1,000 of 4,000 after 0 s"}
    assert lines.out == ""
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "it ends with the work"


def test_a_terminal_shows_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar() as tell:
        tell("trying layouts", 3, 1000)
        tell("done", 1000, 1000)
    assert "done" in terminal.getvalue()
    assert "1,000 of 1,000" in terminal.getvalue()


def test_what_is_not_asked_for_is_not_imported():
    heavy = "matplotlib", "ortools", "torch", "megatron_hexi.planner", "megatron_hexi.lab.simulator"
    code = f"import sys, megatron_hexi.cli.main; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_refusal_is_one_line_in_json_mode_too(hexi):
    result = hexi("plan", "cluster.yaml", *JOB, "--data-parallel-size", "x", "-o", "plan.yaml", "--json")
    assert (result.code, json.loads(result.out)["exit_code"]) == (2, 2)
    assert is_one_error_line(result.err)


def test_a_plan_says_which_kernels_it_counts_on(hexi, asked):
    words = ("plan", "cluster.yaml", *JOB[:2], "--seq-length", "128K", "-o", "plan.yaml")
    out = hexi(*words).out
    assert "attention kernel: flash-attn-3 on H100-SXM-80GB, flash-attn-2 on A100-SXM-80GB" in out
    longer = r"the shipped image has cudnn, with which this plan takes (\d+\.\d)% longer: build"
    (part,) = re.findall(longer, " ".join(out.split()))
    assert float(part) >= 1
    assert "plan with --kernel H100-SXM-80GB=cudnn" in " ".join(out.split())
    short = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").out  # attention is little of it
    assert "the shipped image" not in short
    chosen = hexi(*words, "--kernel", "H100=cudnn,A100=flash-attn-2", "--json")
    found = {"H100-SXM-80GB": "cudnn", "A100-SXM-80GB": "flash-attn-2"}
    assert json.loads(chosen.out)["kernels"] == found


@pytest.mark.parametrize(
    ("kernel", "remedy"),
    [
        ("B200=cudnn", "name one of H100-SXM-80GB, A100-SXM-80GB"),
        ("H100=flash3", "use flash-attn-3 or cudnn or flash-attn-2"),
        ("cudnn", "A100-SXM-80GB: no curves for kernel cudnn; use flash-attn-2"),
        ("H100", "use flash-attn-3 or cudnn"),
        ("H100=cudnn,A100", "is not GPU=NAME"),
    ],
)
def test_a_wrong_kernel_is_refused_before_anything_is_planned(hexi, asked, kernel, remedy):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "made.yaml").code == 0
    asked.clear()
    on_cluster = ("--cluster", "cluster.yaml", "--model", "gpt-3b", "--kernel", kernel)
    for words in (
        ("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--kernel", kernel),
        ("compare", "cluster.yaml", *JOB, "--kernel", kernel),
        ("simulate", "made.yaml", *on_cluster),
        ("validate", "made.yaml", *on_cluster, "--json"),
    ):
        result = hexi(*words)
        assert result.code == 2
        assert is_one_error_line(result.err)
        assert remedy in result.err
    assert not Path("plan.yaml").exists()
    assert asked == []


def test_another_model_s_flags_do_not_join_a_plan(hexi, asked):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    joined = hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--model", "llama3-70b")
    assert joined.code == 2
    assert (
        "plan.yaml: workload.heads is 32, but the job has --num-attention-heads 64; workload." in joined.err
    )
