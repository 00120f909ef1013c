"""`hexi plan`, `compare` and `simulate`: what they print, write and draw, and what else they leave alone."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hexi import planner
from megatron_hexi.cli import main as cli
from megatron_hexi.cli import output
from megatron_hexi.cli.options import NewJob
from megatron_hexi.cli.output import PICTURE_FORMATS, check_outputs, progress_bar
from megatron_hexi.cluster import PlannerRules
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.plan import plan_digest, read_plan
from megatron_hexi.planner import CHOSEN
from tests.support.planned import baseline, make_planned
from tests.support.shell import call_hexi, is_one_error_line

CLUSTER = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 4}
- {name: a100, gpu: A100-SXM-80GB, gpus: 4}
network: {bandwidth_gb_s: 25}
"""

JOB = ("--model", "gpt-3b", "--seq-length", 16384, "--recompute-granularity", "full")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a cluster file."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    return tmp_path


@pytest.fixture
def hexi(folder, monkeypatch, capsys):
    """Calls ``hexi WORDS…`` in that folder."""
    return lambda *words: call_hexi(monkeypatch, capsys, words)


@pytest.fixture
def asked(monkeypatch):
    """Puts a planner without a search in place; what it was asked."""
    calls = []

    def find_plan(request, cluster, *, with_baselines=False, progress=None):
        calls.append((request, with_baselines, progress))
        baselines = [baseline("ring", 1000.0), baseline("ulysses", why_not="no")] if with_baselines else []
        return make_planned(
            request.job, cluster, [[[3] * 4, [1] * 4]], baselines=baselines, notes=["it was made up"]
        )

    monkeypatch.setattr(planner, "find_plan", find_plan)
    return calls


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
    note = "note: --global-batch-size is not given: planned for 8 sequences an iteration"
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
    ((request, _, _),) = asked
    assert request.rules == PlannerRules(offload=False, unequal_replicas=True)
    assert request.context_parallel == 2
    assert request.virtual_stages is None
    assert request.fixed == {"recompute"}


def test_chunks_of_a_stage_reach_the_planner(hexi, asked):
    words = ("--num-virtual-stages-per-pipeline-rank", 2)
    assert hexi("plan", "cluster.yaml", *JOB, *words, "-o", "plan.yaml").code == 0
    ((request, _, _),) = asked
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
    ((request, with_baselines, progress),) = asked
    job = request.job
    assert request.fixed == set(CHOSEN) - {"data_parallel"}
    assert {field: getattr(job, field) for field, _ in words.values()} == dict(words.values())
    assert (job.model.name, job.seq_length) == ("gpt-3b", 16384)
    switches = job.distributed_optimizer, job.overlap_gradients, job.sequence_parallel
    assert switches == (False, False, False)
    assert (with_baselines, progress) == (True, None)


def test_defaults(hexi, asked):
    assert (
        hexi("plan", "cluster.yaml", "--model", "gpt-3b", "--seq-length", 4096, "-o", "plan.yaml").code == 0
    )
    ((request, with_baselines, _),) = asked
    job = request.job
    assert (request.fixed, with_baselines) == (frozenset(), False)
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


def test_progress_is_for_terminals_only(monkeypatch):
    with progress_bar() as tell:
        assert tell is None
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar() as tell:
        assert tell
        tell("trying layouts", 3, 1000)
        tell("done", 1000, 1000)
    assert "done" in terminal.getvalue()
    assert "1,000 of 1,000" in terminal.getvalue()


def test_what_is_not_asked_for_is_not_imported():
    heavy = "matplotlib", "ortools", "torch", "megatron_hexi.planner", "megatron_hexi.lab.simulator"
    code = f"import sys, megatron_hexi.cli.main; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


# From here on with the planner and the simulator as they are.


def test_what_is_planned_is_what_is_validated_shown_and_simulated(hexi):
    code, out, _ = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--json")
    planned = json.loads(out)
    assert code == 0
    assert planned["iteration_s"] >= planned["lower_bound_s"] * (1 - 1e-9)
    assert planned["tokens_per_s"] <= planned["ceiling_tokens_per_s"]

    # The plan names its model.
    job = "--cluster", "cluster.yaml", "--recompute-granularity", "full", "--json"
    code, out, _ = hexi("validate", "plan.yaml", *job)
    checked = json.loads(out)["estimate"]
    assert code == 0
    for name in ("tokens_per_s", "iteration_s", "memory_gib"):
        assert checked[name] == pytest.approx(planned[name])

    shown = hexi("show", "plan.yaml")
    assert shown.code == 0
    assert f"no plan takes less than {planned['lower_bound_s']:.3f} s" in shown.out

    code, out, err = hexi("simulate", "plan.yaml", *job, "--trace", "trace.json", "--picture", "sim.png")
    simulated = json.loads(out)
    assert (code, err) == (0, "wrote trace.json\ndrew sim.png\n")
    assert simulated["fits"] is True
    # Two ways to the same: far apart, one of them is wrong.
    assert simulated["iteration_s"] == pytest.approx(planned["iteration_s"], rel=0.3)
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {member.lead for member in read_plan("plan.yaml").members}
    assert Path("sim.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_reports_and_says_what_does_not_fit(hexi):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    report = hexi("simulate", "plan.yaml", "--cluster", "cluster.yaml")
    assert (report.code, report.err) == (0, "")
    assert "simulated: " in report.out
    words = ("plan", "cluster.yaml", *JOB, "--seq-length", 131072, "-o", "long.yaml")
    assert hexi(*words).code == 0
    contradicted = hexi("simulate", "long.yaml", "--cluster", "cluster.yaml", "--precision", "fp32")
    assert contradicted.code == 2
    assert "long.yaml: job.precision is bf16, the command line has --precision fp32" in contradicted.err
    text = Path("long.yaml").read_text()
    Path("long.yaml").write_text(re.sub("recompute: full", "recompute: none", text))
    crowded = hexi("simulate", "long.yaml", "--cluster", "cluster.yaml", "--json")
    assert crowded.code == 0
    assert crowded.err.startswith("note: long.yaml does not fit in memory: rank ")
    assert json.loads(crowded.out)["fits"] is False


def test_compare_has_every_baseline_and_hexi_first(hexi):
    code, out, err = hexi("compare", "cluster.yaml", *JOB, "--json")
    document = json.loads(out)
    names = [one["name"] for one in document["results"]]
    assert (code, err, names[0]) == (0, "", "hexi")
    assert {
        *("ring", "ulysses", "usp", "te-a2a+p2p", "proportion", "homogeneous", "uneven-layers"),
        "hexiscale",
        "zorse",
    } <= set(names)
    for one in document["results"]:
        assert (one["tokens_per_s"] is None) == bool(one["why_not"])
        assert one["layout"] or one["why_not"]


@pytest.mark.slow  # planner/test_determinism.py asks the planner itself
def test_the_same_input_gives_the_same_plan(hexi):
    for name in ("one.yaml", "two.yaml"):
        assert hexi("plan", "cluster.yaml", *JOB, "-o", name).code == 0
    assert Path("one.yaml").read_bytes() == Path("two.yaml").read_bytes()


def test_a_plan_on_a_part_of_the_cluster_names_its_gpus(hexi):
    # Three of one node cannot take part in units of two.
    Path("cluster.yaml").write_text(CLUSTER.replace("gpus: 4}", "gpus: 3}", 1))
    words = (*JOB, "--tensor-model-parallel-size", 2, "-o", "plan.yaml", "--json")
    code, out, _ = hexi("plan", "cluster.yaml", *words)
    document = json.loads(out)
    assert code == 0
    assert 2 not in document["gpus"]
    assert any("left out" in note for note in document["notes"])
    assert "ranks must be started on these GPUs" in hexi("show", "plan.yaml").out
    assert (
        hexi("validate", "plan.yaml", "--cluster", "cluster.yaml", "--recompute-granularity", "full").code
        == 0
    )


def test_a_refusal_is_one_line_in_json_mode_too(hexi):
    result = hexi("plan", "cluster.yaml", *JOB, "--data-parallel-size", "x", "-o", "plan.yaml", "--json")
    assert (result.code, json.loads(result.out)["exit_code"]) == (2, 2)
    assert is_one_error_line(result.err)


def test_a_plan_says_which_kernels_it_counts_on(hexi, asked):
    words = ("plan", "cluster.yaml", *JOB, "-o", "plan.yaml")
    out = hexi(*words).out
    assert "attention kernel: flash-attn-3 on H100-SXM-80GB, flash-attn-2 on A100-SXM-80GB" in out
    assert "plan with --kernel H100-SXM-80GB=cudnn" in " ".join(out.split())
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


ARGUMENTS = """\
--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000   # a model,
--position-embedding-type rope
--seq-length 4096 --micro-batch-size 2 --global-batch-size 4 --bf16 --recompute-activations   # a job,
--lr 1e-3 --train-iters 5                                                    # and more
"""


def test_a_file_of_arguments_is_the_job(hexi, asked):
    Path("job.args").write_text(ARGUMENTS)
    done = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert done.code == 0
    job = asked[0][0].job
    assert asked[0][0].fixed == {"micro_batch_size", "recompute"}
    assert (job.seq_length, job.micro_batch_size, job.global_batch_size) == (4096, 2, 4)
    assert (job.precision, job.recompute, job.distributed_optimizer) == ("bf16", "selective", False)
    said, unread, *_ = done.err.splitlines()
    assert said.startswith("note: job.args says ")
    for words in ("--seq-length 4096", "--recompute-granularity selective", "--no-use-distributed-optimizer"):
        assert words in said
    assert unread == "note: job.args: plans do not depend on --lr, --train-iters"
    terms = read_plan("plan.yaml").job
    assert (terms.micro_batch_size, terms.global_batch_size, terms.recompute) == (2, 4, "selective")
    assert (terms.precision, terms.distributed_optimizer, terms.sequence_parallel) == ("bf16", False, None)


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("--sft --no-rope-fusion --micro-batch-size 1", ("unequal_replicas", "unequal_stages")),
        ("--optimizer muon", ("unequal_stages",)),
        ("--dataloader-inter-document-masking --no-rope-fusion --micro-batch-size 1", ("unequal_stages",)),
        ("--dataloader-type external", ("unequal_replicas", "unequal_stages")),
    ],
)
def test_an_option_that_leaves_some_plans_restricts_the_search(hexi, asked, option, refused):
    Path("job.args").write_text(f"{ARGUMENTS}\n{option}")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    done = hexi(*words)
    assert asked[0][0].rules.refused == refused
    note = f"note: job.args: {option.split()[0]} trains with "
    assert note + " and ".join(f"--no-{name.replace('_', '-')}" for name in refused) in done.err
    contrary = hexi(*words, f"--{refused[-1].replace('_', '-')}")
    assert contrary.code == 2
    assert f"--unequal-stages: {option.split()[0]} of job.args does not work with it" in contrary.err


def test_the_imbalance_of_experts_is_a_term_of_the_job(hexi, asked):
    given = NewJob(model="mixtral-8x7b", seq_length=4096, expert_imbalance=0.6)
    assert given.request().job.expert_imbalance == 0.6
    assert NewJob(model="mixtral-8x7b", seq_length=4096).request().job.expert_imbalance == 0.2
    refused = hexi("plan", "cluster.yaml", *JOB, "--expert-imbalance", "0.6", "-o", "plan.yaml")
    assert (refused.code, refused.out) == (2, "")
    assert "--expert-imbalance 0.6: gpt-3b has no experts; leave it out" in refused.err


def test_a_context_parallel_size_in_a_file_is_said_to_be_chosen_anew(hexi, asked):
    Path("job.args").write_text(f"{ARGUMENTS}\n--context-parallel-size 2")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    note = "note: job.args: --context-parallel-size 2 is chosen anew; give it on the command line"
    assert note in hexi(*words).err
    assert note not in hexi(*words, "--context-parallel-size", 4).err
    assert [request.context_parallel for request, _, _ in asked] == [None, 4]


def test_chunks_in_a_file_are_said_to_be_chosen_anew(hexi, asked):
    stages = "--num-layers 4 --pipeline-model-parallel-size 2"
    Path("job.args").write_text(f"{ARGUMENTS}\n{stages} --num-layers-per-virtual-pipeline-stage 1")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    flag = "--num-virtual-stages-per-pipeline-rank"
    note = f"note: job.args: --num-layers-per-virtual-pipeline-stage 1 is chosen anew; give {flag} on the"
    assert note in hexi(*words).err
    assert note not in hexi(*words, flag, 2).err
    assert [request.virtual_stages for request, _, _ in asked] == [None, 2]


def test_an_expert_parallel_size_stays_and_the_command_line_goes_before_the_file(hexi, asked):
    experts = "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
    Path("job.args").write_text(f"{ARGUMENTS}\n{experts}")
    words = ("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert "note: job.args says --expert-model-parallel-size 2" in hexi(*words).err
    hexi(*words, "--expert-model-parallel-size", 4)
    assert [request.expert_parallel for request, _, _ in asked] == [2, 4]


@pytest.mark.parametrize("option", ["--attention-backend fused", "--fp8-format hybrid"])
def test_what_training_refuses_is_refused_before_anything_is_planned(hexi, asked, option):
    Path("job.args").write_text(f"{ARGUMENTS}{option}")
    result = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert result.code == 2
    assert result.err.startswith(f"hexi: error: job.args, line 5: {option.split()[0]} does not work with ")
    assert asked == []


def test_what_stages_refuse_is_refused_with_experts(hexi, asked):
    """Plans say where experts are in stages with layers, which need Megatron's alltoall dispatcher."""
    Path("job.args").write_text(f"{ARGUMENTS}--num-experts 8")
    result = hexi("plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml")
    assert result.code == 2
    assert "job.args: --moe-token-dispatcher-type does not work with stages" in result.err
    assert "give --moe-token-dispatcher-type alltoall" in result.err
    assert asked == []


def test_another_model_s_flags_do_not_join_a_plan(hexi, asked):
    assert hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml").code == 0
    joined = hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--model", "llama3-70b")
    assert joined.code == 2
    assert "plan.yaml: workload.heads is 32, the job has --num-attention-heads 64; use a plan" in joined.err


def test_the_command_line_stands_before_the_file_of_arguments(hexi, asked):
    Path("job.args").write_text(ARGUMENTS)
    words = ("--seq-length", 8192, "--recompute-granularity", "none", "--use-distributed-optimizer")
    done = hexi("compare", "cluster.yaml", "--model", "job.args", *words)
    assert done.code == 0
    job = asked[0][0].job
    assert (job.seq_length, job.recompute, job.distributed_optimizer) == (8192, "none", True)
    assert (job.micro_batch_size, job.precision, job.overlap_gradients) == (2, "bf16", False)
    said = done.err.splitlines()[0]
    assert not {"--seq-length", "--recompute-granularity", "--no-use-distributed-optimizer"} & set(
        said.split()
    )


def test_a_length_that_nobody_states_is_asked_for(hexi, asked):
    Path("model.args").write_text(ARGUMENTS.replace("--seq-length 4096", ""))
    for model in ("model.args", "gpt-3b"):
        done = hexi("plan", "cluster.yaml", "--model", model, "-o", "plan.yaml")
        assert (done.code, asked) == (2, [])
        assert f"--seq-length is missing, and {model} does not say it; add --seq-length N" in done.err


def test_a_plan_s_terms_stand_before_those_of_its_model_s_file(hexi):
    Path("job.args").write_text(ARGUMENTS)
    assert (
        hexi(
            *("plan", "cluster.yaml", "--model", "job.args", "--recompute-granularity", "full"),
            # Stages of their own state what they recompute.
            *("--no-unequal-stages", "--pipeline-model-parallel-size", 1, "-o", "p.yaml"),
        ).code
        == 0
    )
    planned = json.loads(hexi("validate", "p.yaml", "--cluster", "cluster.yaml", "--json").out)
    assert planned["estimate"]["iteration_s"] == pytest.approx(
        read_plan("p.yaml").estimate.iteration_s  # type: ignore[union-attr]
    )
    # A plan that says nothing of its job, as one written by hand: then the command line and the file do.
    text = Path("p.yaml").read_text()
    Path("p.yaml").write_text(re.sub(r"\njob:\n(  .*\n)+", "\n", text))
    other = ("--recompute-granularity", "none", "--json")
    changed = json.loads(hexi("validate", "p.yaml", "--cluster", "cluster.yaml", *other).out)
    assert changed["estimate"]["iteration_s"] < planned["estimate"]["iteration_s"]
    done = hexi("validate", "p.yaml", "--cluster", "cluster.yaml", "--json")
    assert done.err.startswith("note: job.args says --micro-batch-size 2 ")
    found = json.loads(done.out)["estimate"]["iteration_s"]
    assert changed["estimate"]["iteration_s"] < found < planned["estimate"]["iteration_s"]
