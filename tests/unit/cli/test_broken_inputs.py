"""Broken and impossible inputs: each refused at once, in one line that names it and says what to do instead.

Nothing is written, and nothing is printed but that line. How long it takes, `benchmarks.answers` measures.
"""

import functools
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.answers import BOMB
from megatron_hexi.plan import Workload, dump_plan, proportional_plan
from tests.support.shell import call_hexi, is_one_error_line

#: A refusal that takes so long has read what it should have refused.
pytestmark = pytest.mark.timeout(60)

NODES = "- {name: h100, gpu: H100-SXM-80GB, gpus: 4}\n- {name: a100, gpu: A100-SXM-80GB, gpus: 4}\n"
NETWORK = "network: {bandwidth_gb_s: 25}\n"
GOOD = f"name: small\nnodes:\n{NODES}{NETWORK}"

CURVE = "{points: [[1, 100]], source: test}"
BAD_CURVE = "{points: [[1, -100]], source: test}"


def one_kind(gpu="H100-SXM-80GB", gpus=4, count=1, rest=NETWORK):
    return f"name: small\nnodes:\n- {{name: n, gpu: {gpu}, gpus: {gpus}, count: {count}}}\n{rest}"


def matrix(bandwidth):
    return (
        f"name: small\nnodes:\n{NODES}matrix:\n  nodes: [h100-0, a100-0]\n"
        f"  bandwidth_gb_s: {bandwidth}\n  latency_us: [[0, 5], [5, 0]]\n"
    )


#: Cluster files, and a part of what is said of each.
CLUSTERS = {
    "unknown GPU": (one_kind("H100"), "nodes[0].gpu = 'H100'"),
    "zero GPUs": (one_kind(gpus=0), "nodes[0].gpus = 0 is too small"),
    "a negative number of GPUs": (one_kind(gpus=-8), "nodes[0].gpus = -8 is too small"),
    "half a GPU": (one_kind(gpus=1.5), "nodes[0].gpus = 1.5"),
    "a million GPUs in a node": (one_kind(gpus=10**6), "nodes[0].gpus = 1000000 is too large"),
    "a million GPUs in all": (one_kind(gpus=1000, count=1000), "have 1000000 GPUs in all; at most"),
    "no nodes": (f"name: small\nnodes: []\n{NETWORK}", "nodes = [] is empty"),
    "nodes not a list": (f"name: small\nnodes: 3\n{NETWORK}", "nodes = 3 is not a list"),
    "no name": (f"nodes:\n{NODES}{NETWORK}", "name is missing"),
    "negative bandwidth": (
        one_kind(count=2, rest="network: {bandwidth_gb_s: -25}\n"),
        "network.bandwidth_gb_s = -25 is too small",
    ),
    "bandwidth NaN": (
        one_kind(count=2, rest="network: {bandwidth_gb_s: .nan}\n"),
        "network.bandwidth_gb_s = nan",
    ),
    "bandwidth infinite": (
        one_kind(count=2, rest="network: {bandwidth_gb_s: .inf}\n"),
        "bandwidth_gb_s = inf",
    ),
    "bandwidth in words": (
        one_kind(count=2, rest="network: {bandwidth_gb_s: fast}\n"),
        "bandwidth_gb_s = 'fast' is not a number",
    ),
    "nodes that cannot reach each other": (one_kind(count=2, rest=""), "network is missing: the 2 nodes"),
    "a matrix with a zero": (matrix("[[0, 10], [0, 0]]"), "a100-0 cannot send to h100-0"),
    "a matrix with a row too few": (matrix("[[0, 10]]"), "has 1 rows for 2 nodes"),
    "two entries of one name": (
        f"name: small\nnodes:\n{NODES.replace('a100, gpu', 'h100, gpu')}{NETWORK}",
        "'h100' is that of nodes[0]",
    ),
    "a curve with a negative rate": (
        one_kind(rest=f"{NETWORK}devices:\n  H100-SXM-80GB: {{matmul: {BAD_CURVE}}}\n"),
        "matmul.points[0][1] = -100 is too small",
    ),
    "a GPU of which little is said": (
        one_kind("MINE", rest=f"{NETWORK}devices:\n  MINE: {{matmul: {CURVE}}}\n"),
        "devices.MINE.memory_gb is missing",
    ),
    "no speed at all": (GOOD.replace("gpus: 4}", "gpus: 4, speed: 0}", 1), "nodes[0].speed = 0 is too small"),
    "an unknown field": (GOOD + "colour: red\n", "colour is not a known field"),
    "a field given twice": (GOOD + NETWORK, "network is given twice"),
    "a YAML bomb": (BOMB, "alias *a is not allowed"),
    "deep nesting": ("[" * 10_000, "nested more than 50 levels deep"),
    "a list": ("- a\n- b\n", "a cluster file is a mapping"),
    "a number": ("3\n", "a cluster file is a mapping"),
    "an empty file": ("", "is empty; a cluster file is a mapping"),
    "no YAML": ("name: [\n", "not valid YAML"),
    "two documents": ("name: a\n---\nname: b\n", "not valid YAML"),
}

#: Options of `hexi plan` and `hexi compare` on a good cluster, and a part of what is said of them.
OPTIONS = {
    "an unknown model": (
        "--model gpt-8b",
        "unknown model 'gpt-8b': it is no preset, recipe or file; did you mean",
    ),
    "a model file that is a plan": ("--model plan.yaml", "plan.yaml"),
    "a config without keys": ("--model config.json", "config.json: num_hidden_layers is missing"),
    "a config with 0 heads": (
        "--model no-heads.json",
        "num_attention_heads = 0; write a whole number above 0",
    ),
    "a config that is cut off": ("--model cut.json", "cut.json"),
    "no tokens": ("--seq-length 0", "--seq-length 0: write a whole number above 0"),
    "a negative length": ("--seq-length -5", "--seq-length -5: write a whole number above 0"),
    "10^15 tokens": (f"--seq-length {10**15}", "--seq-length 1000000000000000: is too large"),
    "a length in words": ("--seq-length long", "--seq-length': 'long' is not a whole number"),
    "a batch of 0": ("--global-batch-size 0", "--global-batch-size 0: write a whole number above 0"),
    "a batch of 10^12": (f"--global-batch-size {10**12}", "--global-batch-size 1000000000000: is too large"),
    "a batch that is no multiple": ("--micro-batch-size 3", "--global-batch-size 8: give a multiple of"),
    "heads that do not divide": (
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 3: give a number that divides",
    ),
    "units larger than a node": ("--tensor-model-parallel-size 8", "--tensor-model-parallel-size 8"),
    "more stages than layers": (
        "--pipeline-model-parallel-size 99",
        "--pipeline-model-parallel-size 99: pipelines of up to 16 stages are planned; give 16 or fewer",
    ),
    "more stages than GPUs": (
        "--pipeline-model-parallel-size 16",
        "--pipeline-model-parallel-size 16: take 16 GPUs, cluster",
    ),
    "more units than GPUs": (
        "--context-parallel-size 5 --tensor-model-parallel-size 2",
        "--context-parallel-size 5 --tensor-model-parallel-size 2: take 10 GPUs, cluster",
    ),
    "a feature without what it needs": (
        "--ministages --no-unequal-stages",
        "--ministages and --no-unequal-stages: the first needs the unequal stages that",
    ),
    "no context-parallel size": (
        "--context-parallel-size 0",
        "--context-parallel-size 0: give a number above 0, or leave it out",
    ),
    "no replica": ("--data-parallel-size 0", "--data-parallel-size 0: give a number above 0, or auto"),
    "replicas in words": (
        "--data-parallel-size many",
        "--data-parallel-size many: give a number above 0, or auto",
    ),
    "minus one replica": (
        "--data-parallel-size -1",
        "--data-parallel-size -1: give a number above 0, or auto",
    ),
    "10^99 replicas": (f"--data-parallel-size {10**99}", "give a number above 0, or auto"),
    "more replicas than GPUs": ("--data-parallel-size 16 --global-batch-size 16", "--data-parallel-size 16"),
    "more replicas than micro-batches": (
        "--data-parallel-size 3 --global-batch-size 2",
        "--data-parallel-size 3: an iteration has 2 micro-batches",
    ),
    "an unknown precision": ("--precision int4", "--precision int4: use bf16, fp16, fp32"),
    "scales without fp8": (
        "--precision bf16 --fp8-recipe delayed",
        "--fp8-recipe delayed: applies to jobs in fp8 only",
    ),
    "fp8 everywhere without fp8": ("--fp8-everywhere", "the job is in bf16; give --precision fp8 too"),
    "unknown scales": (
        "--precision fp8 --fp8-recipe rowwise",
        "--fp8-recipe rowwise: use tensorwise, delayed",
    ),
    "fp8 on GPUs that all lack it": (
        "--precision fp8 --fp8-recipe mxfp8",
        "--precision fp8: no rate of H100-SXM-80GB in fp8 by mxfp8 scales is known",
    ),
    "a precision that a GPU lacks": (
        "--cluster v100.yaml",
        "V100-SXM2-32GB: no bf16 on this GPU; use precision",
    ),
    "an unknown kernel": ("--kernel flash-attn-9", "flash-attn-9"),
    "a kernel that one GPU lacks": ("--kernel flash-attn-3", "flash-attn-3"),
    "an unknown recomputation": (
        "--recompute-granularity some",
        "--recompute-granularity some: use none, selective, full",
    ),
    "an unknown option": ("--sequence-length 5", "No such option: --sequence-length"),
    "a cluster file that is a plan": ("--cluster plan.yaml", "plan.yaml"),
    "a cluster file that is not there": (
        "--cluster absent.yaml",
        "absent.yaml: cannot be read (No such file",
    ),
    "a folder as cluster file": ("--cluster .", "cannot be read (a folder, no regular file"),
    "a cluster file that is no text": ("--cluster binary.yaml", "binary.yaml: not text"),
    "a picture in no format": (
        "--picture out.xyz",
        "out.xyz: a picture in an unknown format; end its name in",
    ),
    "a picture in no folder": ("--picture absent/out.png", "the folder absent is not there; make it first"),
    "a picture over the cluster file": ("--picture ./cluster.png.yaml", "unknown format"),
}

#: `hexi plan` alone.
OUTPUTS = {
    "no output": ("", "Missing option"),
    "a folder that is not there": ("-o absent/plan.yaml", "the folder absent is not there; make it first"),
    "a folder as output": ("-o .", "is a folder; give the name of a file"),
    "the cluster file as output": ("-o ./cluster.yaml", "cluster.yaml: this command reads or writes"),
    "one file twice": ("-o out.png --picture out.png", "out.png: this command reads or writes"),
}

#: What `hexi validate` and `hexi simulate` are given beside a plan for 8 GPUs.
REPLAYS = {
    "a plan for fewer GPUs": ("small.yaml --cluster cluster.yaml", "has 8 GPUs, but the plan is for 5"),
    "a cluster file as plan": ("cluster.yaml --cluster cluster.yaml", "cluster.yaml"),
    "a plan as cluster file": ("plan.yaml --cluster plan.yaml", "plan.yaml"),
    "a plan that is not there": ("absent.yaml --cluster cluster.yaml", "absent.yaml: cannot be read"),
    "a plan that is no text": ("binary.yaml --cluster cluster.yaml", "binary.yaml: not text"),
    "a plan that is a bomb": ("bomb.yaml --cluster cluster.yaml", "alias *a is not allowed"),
    "a plan that is empty": ("empty.yaml --cluster cluster.yaml", "empty.yaml:1: not a plan"),
    "a plan without heads": ("headless.yaml --cluster cluster.yaml", "workload.heads = 0 is too small"),
    "a plan with a gap": ("torn.yaml --cluster cluster.yaml", "torn.yaml:"),
    "another model": (
        "plan.yaml --cluster cluster.yaml --model gpt-3b",
        "workload.head_dim: the plan is for",
    ),
    "a unit on two nodes": ("wide.yaml --cluster odd.yaml", "span two nodes"),
    "another batch": ("plan.yaml --cluster cluster.yaml --micro-batch-size 5", "--global-batch-size 8"),
}


@functools.cache
def plans():
    """The text of good plans, by the names of their files."""
    workload, wide = Workload(4096, 32, 32, 128), Workload(4096, 32, 32, 128, tensor_parallel=2)
    made = {
        "plan.yaml": proportional_plan(workload, [[[2] * 4, [1] * 4]]),
        "small.yaml": proportional_plan(workload, [[[2] * 4, [1]]]),
        "wide.yaml": proportional_plan(wide, [[[1] * 3]]),
    }
    return {name: dump_plan(plan) for name, plan in made.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with good files and bad ones."""
    monkeypatch.chdir(tmp_path)
    for name, text in plans().items():
        Path(name).write_text(text)
    plan = plans()["plan.yaml"]
    Path("headless.yaml").write_text(plan.replace(" heads: 32", " heads: 0"))
    Path("torn.yaml").write_text(plan.replace("seq_length: 4096", "seq_length: 4097"))
    Path("cluster.yaml").write_text(GOOD)
    Path("odd.yaml").write_text(one_kind(gpus=3, count=2))
    Path("v100.yaml").write_text(GOOD.replace("A100-SXM-80GB", "V100-SXM2-32GB"))
    Path("bomb.yaml").write_text(BOMB)
    Path("empty.yaml").write_text("")
    Path("binary.yaml").write_bytes(bytes(range(256)))
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4}
    Path("config.json").write_text(json.dumps(config))
    Path("no-heads.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "num_attention_heads": 0}))
    Path("cut.json").write_text(json.dumps(config)[:-5])
    return tmp_path


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    """Calls hexi and checks that it refuses as it should; what it says."""

    def call(words, said, code=2, printed=""):
        before = snapshot(folder)
        result = call_hexi(monkeypatch, capsys, words)
        assert result.code == code, result.err
        assert result.out in ("", printed)
        assert is_one_error_line(result.err)
        assert said in result.err
        assert snapshot(folder) == before
        return result.err

    return call


def snapshot(folder):
    """All files and what is in them."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


JOB = "--model gpt-7b --seq-length 4096 --recompute-granularity full"


def words_of(command, options):
    """A good call with some options in place of the good ones: of those given twice the last counts."""
    given = options.split()
    cluster = "cluster.yaml"
    if "--cluster" in given:
        at = given.index("--cluster")
        cluster = given[at + 1]
        del given[at : at + 2]
    return [command, cluster, *JOB.split(), *given]


def test_the_good_call_is_good(folder, monkeypatch, capsys):
    assert call_hexi(monkeypatch, capsys, [*words_of("plan", ""), "-o", "out.yaml"]).code == 0
    assert Path("out.yaml").exists()


@pytest.mark.parametrize("case", CLUSTERS)
def test_cluster_files(refused, case):
    text, said = CLUSTERS[case]
    Path("broken.yaml").write_text(text)
    for words in (
        [*words_of("plan", "--cluster broken.yaml"), "-o", "out.yaml"],
        ["simulate", "plan.yaml", "--cluster", "broken.yaml", "--model", "gpt-7b"],
    ):
        assert "broken.yaml:" in refused(words, said)


@pytest.mark.parametrize("case", OPTIONS)
def test_options(refused, case):
    options, said = OPTIONS[case]
    for command, more in (("plan", ["-o", "out.yaml"]), ("compare", [])):
        line = refused([*words_of(command, options), *more], said)
        if "--help" in line:
            assert line.endswith(f"see hexi {command} --help\n")


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs(refused, case):
    options, said = OUTPUTS[case]
    refused(words_of("plan", options), said)


@pytest.mark.parametrize("case", REPLAYS)
def test_replays(refused, case):
    options, said = REPLAYS[case]
    words = options.split()
    if "--model" not in words:
        words += ["--model", "gpt-7b"]
    refused(["simulate", *words], said)
    # A plan whose own rules hold is called valid before it is held against the cluster.
    ranks = {"small.yaml": 5, "wide.yaml": 6}.get(words[0], 8)
    refused(["validate", *words], said, printed=f"{words[0]}: a valid plan for {ranks} ranks\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param("--seq-length 8388608", "GiB", id="too long"),
        pytest.param("--model gpt-70b --no-offload", "GiB", marks=pytest.mark.slow, id="too large"),
        pytest.param(
            *("--model gpt-70b --no-offload --data-parallel-size auto", "GiB"),
            marks=pytest.mark.slow,
            id="too large for any replicas",
        ),
        pytest.param(f"--seq-length {2**40}", "GiB", marks=pytest.mark.slow, id="as long as can be counted"),
    ],
)
@pytest.mark.parametrize("command", ["plan", pytest.param("compare", marks=pytest.mark.slow)])
def test_what_does_not_fit_in_memory_is_code_3(refused, command, options, said):
    out = ("-o", "out.yaml") if command == "plan" else ()
    refused([*words_of(command, options), *out], said, code=3)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(  # in this process: the test before
            *("plan cluster.yaml --model gpt-7b --seq-length 8388608 -o out.yaml", 3), marks=pytest.mark.slow
        ),
        ("plan cluster.yaml --model gpt-8b --seq-length 4096 -o out.yaml", 2),
        ("compare bomb.yaml --model gpt-7b --seq-length 4096", 2),
        ("simulate binary.yaml --cluster cluster.yaml", 2),
    ],
)
def test_from_a_shell(forks, folder, words, code):
    before = snapshot(folder)
    run = subprocess.run(
        [forks.python, "-m", "megatron_hexi.cli.main", *words.split()],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (run.returncode, run.stdout) == (code, "")
    assert is_one_error_line(run.stderr)
    assert snapshot(folder) == before
