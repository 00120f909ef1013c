"""What is no regular file, or cannot be one: refused by every command, as input and as output.

No case waits, opens a device or changes anything. Devices are nodes made here, never the machine's own.
"""

import os
import socket
import stat
from pathlib import Path

import pytest

from megatron_hexi.lab.testbed import command
from tests.support.covering import covering
from tests.support.refusals import refused, snapshot, write_good_files
from tests.support.shell import call_hexi

pytestmark = pytest.mark.timeout(60)

LONG = "n" * 300
DEEP = "d/" * 2500 + "file"

#: Paths that cannot be read, and what is said of them.
UNREADABLE = {
    "a FIFO without a writer": ("fifo", "(a FIFO that nobody writes to); give a file"),
    "a link to a FIFO": ("to-fifo", "(a FIFO that nobody writes to); give a file"),
    "a device": ("device", "(a device, no regular file)"),
    "a link to a device": ("to-device", "(a device, no regular file)"),
    "a socket": ("socket", "(a socket, no regular file)"),
    "a folder": ("folder", "(a folder, no regular file)"),
    "nothing": ("", "'': is empty (is a variable not set?); give a value"),
    "a link to itself": ("loop", "(Too many levels of symbolic links)"),
    "links to each other": ("loop-1", "(Too many levels of symbolic links)"),
    "a link to nothing": ("dangling", "(No such file or directory)"),
    "a name too long": (LONG, "(File name too long)"),
    "a path too long": (DEEP, "(File name too long)"),
    "a file as folder": ("cluster.yaml/file", "(Not a directory)"),
    "a folder that is not there": ("absent/file", "(No such file or directory)"),
    "2 TiB": ("huge", "2199023255552 bytes, more than the"),
    "a file of the kernel": ("/proc/self/mem", "(Input/output error)"),
    "a file of the kernel without an end": ("/proc/self/pagemap", "more than the"),
}

#: What `hexi --model` says of all that is not there.
_NO_MODEL = ("loop", "loop-1", "dangling", LONG, DEEP, "cluster.yaml/file", "absent/file", "folder")

JOB = ("--model", "gpt-7b", "--seq-length", "4096", "--recompute-granularity", "full")
HERE = ("--cluster", "cluster.yaml", "--model", "gpt-7b")

#: Commands that read a file, with a place for its path.
READERS = {
    "plan": ("plan", "PATH", *JOB, "-o", "out.yaml"),
    "compare": ("compare", "PATH", *JOB),
    "show": ("show", "PATH"),
    "validate": ("validate", "PATH"),
    "simulate": ("simulate", "PATH", *HERE),
    "simulate's cluster": ("simulate", "plan.yaml", "--cluster", "PATH", "--model", "gpt-7b"),
    "simulate's scenario": ("simulate", "plan.yaml", *HERE, "--scenario", "PATH"),
    "report's plan": ("report", "PATH", "--record", "record.jsonl", "-o", "out.html"),
    "report's record": ("report", "run.yaml", "--record", "PATH", "-o", "out.html"),
    "report's cluster": (
        *("report", "run.yaml", "--record", "record.jsonl", "-o", "out.html"),
        *("--cluster", "PATH"),
    ),
    "place's plan": ("place", "PATH", "--cluster", "cluster.yaml", "-o", "hosts"),
    "place's cluster": ("place", "plan.yaml", "--cluster", "PATH", "-o", "hosts"),
    "testbed check": ("testbed", "check", "PATH"),
    "testbed run": ("testbed", "run", "PATH", "--", "-m", "module"),
}

#: Commands that read a model.
MODELS = {
    "plan": ("plan", "cluster.yaml", *JOB, "--model", "PATH", "-o", "out.yaml"),
    "compare": ("compare", "cluster.yaml", *JOB, "--model", "PATH"),
    "simulate": ("simulate", "plan.yaml", *HERE, "--model", "PATH"),
}

#: Paths that cannot be written, and what is said of them.
UNWRITABLE = {
    "a FIFO": ("fifo", "is a FIFO, no regular file; choose another name"),
    "a link to a FIFO": ("to-fifo", "is a FIFO, no regular file"),
    "a device": ("device", "is a device, no regular file"),
    "a link to a device": ("to-device", "is a device, no regular file"),
    "a socket": ("socket", "is a socket, no regular file"),
    "a folder": ("folder", "is a folder; give the name of a file in it"),
    "nothing": ("", "'': is empty (is a variable not set?); give a value"),
    "a link to itself": ("loop", "cannot be written (Too many levels of symbolic links)"),
    "links to each other": ("loop-1", "cannot be written (Too many levels of symbolic links)"),
    "a link into a folder that is not there": ("dangling", "is not there; make it first"),
    "a name too long": (LONG, "cannot be written (File name too long)"),
    "a path too long": (DEEP, "cannot be written (File name too long)"),
    "a file as folder": ("config.json/file", "cannot be written (Not a directory)"),
    "a folder that is not there": ("absent/file", "the folder absent is not there; make it first"),
    "an input": ("INPUT", "this command reads or writes the file already; choose another name"),
    "a link to an input": ("to-INPUT", "this command reads or writes the file already"),
    "an input by another name": ("folder/../INPUT", "this command reads or writes the file already"),
    "a file of the kernel": ("/proc/version", "the folder /proc cannot be written to"),
    "a new file of the kernel": ("/proc/self/file", "the folder /proc/self cannot be written to"),
    "a new file of the kernel's devices": ("/sys/file", "the folder /sys cannot be written to"),
}

#: Commands that write a file: each with a file that it reads.
WRITERS = {
    "plan": (("plan", "cluster.yaml", *JOB, "-o", "PATH"), "cluster.yaml"),
    "plan's model": (("plan", "cluster.yaml", *JOB, "--model", "config.json", "-o", "PATH"), "config.json"),
    "plan's table": (("plan", "cluster.yaml", *JOB, "-o", "plan.yaml", "--tried", "PATH"), "cluster.yaml"),
    "a trace": (("simulate", "plan.yaml", *HERE, "--trace", "PATH"), "plan.yaml"),
    "a trace of a model": (
        ("simulate", "plan.yaml", *HERE, "--model", "config.json", "--trace", "PATH"),
        "config.json",
    ),
    "a page": (("report", "run.yaml", "--record", "record.jsonl", "-o", "PATH"), "record.jsonl"),
    "hosts": (("place", "plan.yaml", "--cluster", "cluster.yaml", "-o", "PATH"), "plan.yaml"),
    "a picture of a plan": (("show", "plan.yaml", "--picture", "PATH"), "plan.yaml"),
    "a picture of plans": (("compare", "cluster.yaml", *JOB, "--picture", "PATH"), "cluster.yaml"),
    "a picture of a simulation": (("simulate", "plan.yaml", *HERE, "--picture", "PATH"), "plan.yaml"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with good files and all that is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h100,a100")
    write_good_files()
    Path("folder").mkdir()
    os.mkfifo("fifo")
    for link, target in {
        "to-fifo": "fifo",
        "to-device": "device",
        "loop": "loop",
        "loop-1": "loop-2",
        "loop-2": "loop-1",
        "dangling": "absent/file",
    }.items():
        Path(link).symlink_to(target)
    for name in ("cluster.yaml", "config.json", "plan.yaml", "record.jsonl"):
        Path(f"to-{name}").symlink_to(name)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    with open("huge", "wb") as file:
        file.truncate(2**41)
    return tmp_path


def make_device() -> None:
    """A node of our own: whatever is done to it, the machine's devices stay."""
    try:
        os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device node takes root")


def words_with(words, path):
    """The command with a path in its place."""
    if path.endswith("device"):
        make_device()
    return [path if word == "PATH" else word for word in words]


@pytest.mark.parametrize(("reader", "kind"), covering(READERS, UNREADABLE))
def test_what_cannot_be_read(folder, monkeypatch, capsys, reader, kind):
    path, said = UNREADABLE[kind]
    error = refused(monkeypatch, capsys, folder, words_with(READERS[reader], path))
    assert f"{path or repr(path)}: " in error
    assert said in error


@pytest.mark.parametrize(("reader", "kind"), covering(MODELS, UNREADABLE))
def test_what_is_no_model(folder, monkeypatch, capsys, reader, kind):
    path, said = UNREADABLE[kind]
    said = "is no preset, recipe or file" if path in _NO_MODEL else said
    assert said in refused(monkeypatch, capsys, folder, words_with(MODELS[reader], path))


@pytest.mark.parametrize(("verb", "kind"), covering(["patch", "unpatch"], UNREADABLE))
def test_what_is_no_checkout(folder, monkeypatch, capsys, verb, kind):
    path, _ = UNREADABLE[kind]
    error = refused(monkeypatch, capsys, folder, words_with((verb, "PATH"), path))
    said = "pretrain_gpt.py: not there; give the folder of a Megatron-LM checkout" if path else "is empty"
    assert said in error


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "loop", "folder", "dangling"])
def test_what_is_no_script_of_a_checkout(folder, monkeypatch, capsys, kind):
    Path("checkout").mkdir()
    Path("checkout/pretrain_gpt.py").symlink_to(f"../{kind}")
    error = refused(monkeypatch, capsys, folder, words_with(("patch", "PATH"), "checkout")[:2])
    assert "checkout/pretrain_gpt.py: " in error
    assert ": not there;" in error or "no regular file" in error or "that nobody writes to" in error


@pytest.mark.parametrize(("writer", "kind"), covering(WRITERS, UNWRITABLE))
def test_what_cannot_be_written(folder, monkeypatch, capsys, writer, kind):
    words, read = WRITERS[writer]
    path, said = UNWRITABLE[kind]
    monkeypatch.setattr("megatron_hexi.planner.find_plan", None)  # any work would fail
    monkeypatch.setattr("megatron_hexi.lab.simulator.simulate", None)
    error = refused(monkeypatch, capsys, folder, words_with(words, path.replace("INPUT", read)))
    assert said in error


@pytest.mark.parametrize("kind", [kind for kind in UNWRITABLE if "input" not in kind])
def test_what_a_plain_plan_cannot_be_written_to(folder, monkeypatch, capsys, kind):
    path, said = UNWRITABLE[kind]
    words = (
        "proportion",
        "--speeds",
        "1,1",
        "--seq-length",
        "64",
        "--num-attention-heads",
        "8",
        "--kv-channels",
        "16",
    )
    assert said in refused(monkeypatch, capsys, folder, words_with((*words, "-o", "PATH"), path))


@pytest.mark.parametrize(
    "path",
    ["fifo", "device", "socket", "folder", "loop", "config.json", "config.json/run", LONG, "/proc/run"],
)
def test_what_is_no_run_folder(folder, monkeypatch, capsys, path):
    example = Path(__file__).parents[3] / "scripts" / "testbed" / "two-fast-two-slow.yaml"
    Path("testbed.yaml").write_text(example.read_text())
    Path("folder/file").touch()
    monkeypatch.setattr(command, "check_tools", lambda: None)
    monkeypatch.setattr(command, "find_isolation", lambda: "none")
    monkeypatch.setattr(command, "_supervised", None)
    words = words_with(("testbed", "check", "testbed.yaml", "--emulate-links", "off", "-o", "PATH"), path)
    error = refused(monkeypatch, capsys, folder, words)
    assert "cannot be used (" in error or "holds files already" in error


@pytest.mark.parametrize("path", ["fifo", "to-fifo", "folder", "loop", LONG, "/proc/run"])
def test_the_doctor_waits_for_no_checkout(folder, monkeypatch, capsys, path):
    before = snapshot(folder)
    result = call_hexi(monkeypatch, capsys, ["doctor", "--local", "--json", "--megatron", path])
    said = "pretrain_gpt.py: not there" if path == "folder" else "no such folder"
    assert said in result.out
    assert snapshot(folder) == before


@pytest.mark.parametrize("kind", [kind for kind in UNWRITABLE if "input" not in kind])
def test_where_no_cluster_file_can_be_written(folder, monkeypatch, capsys, kind):
    path, said = UNWRITABLE[kind]
    monkeypatch.setattr("megatron_hexi.probe.run.probe", None)
    assert said in refused(monkeypatch, capsys, folder, words_with(("probe", "-o", "PATH"), path))


def test_one_more_output_is_held_against_the_others(folder, monkeypatch, capsys):
    plan = ("plan", "cluster.yaml", *JOB, "-o", "out.png")
    assert "out.png: this command reads or writes" in refused(
        monkeypatch, capsys, folder, [*plan, "--picture", "out.png"]
    )
    Path("out.png").symlink_to("plan.png")
    assert "plan.png: this command reads or writes" in refused(
        monkeypatch, capsys, folder, [*plan, "--picture", "plan.png"]
    )
    Path("hosts.0").mkdir()
    words = ("place", "plan.yaml", "--cluster", "cluster.yaml", "-o", "hosts")
    assert "hosts.0: is a folder" in refused(monkeypatch, capsys, folder, words)
    Path("c.partial.json").mkdir()
    assert "c.partial.json: is a folder" in refused(monkeypatch, capsys, folder, ("probe", "-o", "c"))


@pytest.mark.parametrize("name", ["two\nlines.yaml", "\x1b[31mred.yaml", "\u2028.yaml", "\udcff.yaml"])
def test_a_name_that_is_no_text_stays_on_its_line(folder, monkeypatch, capsys, name):
    error = refused(monkeypatch, capsys, folder, ("show", name))
    assert error.count("\n") == len(error.splitlines()) == 1
    assert "\x1b" not in error


#: Commands that write a file, an ending that promises another kind, and what is written.
MISNAMED = {
    "plan": (("plan", "cluster.yaml", *JOB), "-o", "out.json", "the file is to be YAML", ".yaml"),
    "plan's table": (
        ("plan", "cluster.yaml", *JOB, "-o", "out.yaml"),
        *("--tried", "out.jsonl", "the file is to be CSV", ".csv"),
    ),
    "proportion": (
        (
            *("proportion", "--speeds", "1,1", "--seq-length", "64"),
            *("--num-attention-heads", "2", "--kv-channels", "8"),
        ),
        *("-o", "out.png", "the file is to be YAML", ".yaml"),
    ),
    "probe": (("probe",), "-o", "out.JSON", "the file is to be YAML", ".yaml"),
    "report": (
        ("report", "run.yaml", "--record", "record.jsonl"),
        *("-o", "out.pdf", "the file is to be HTML", ".html"),
    ),
    "simulate": (("simulate", "plan.yaml", *HERE), "--trace", "out.gz", "the file is to be JSON", ".json"),
    "launch": (("launch", "plan.yaml", *HERE), "-o", "out.yaml", "the file is to be text", ".txt"),
    "place": (
        ("place", "plan.yaml", "--cluster", "cluster.yaml"),
        *("-o", "out.csv", "the file is to be text", ".txt"),
    ),
    "slurm-arguments": (
        ("slurm-arguments", "config.json", "--plan", "plan.yaml", "--checkpoints", "folder"),
        *("-o", "out.html", "the file is to be text", ".txt"),
    ),
}


@pytest.mark.parametrize("command", MISNAMED)
def test_a_name_that_promises_another_kind_of_file_is_refused(folder, monkeypatch, capsys, command):
    words, option, name, said, ending = MISNAMED[command]
    monkeypatch.setattr("megatron_hexi.probe.run.probe", None)
    error = refused(monkeypatch, capsys, folder, [*words, option, name])
    assert f"{name}: {said}" in error
    assert f"end the name in {ending}" in error


def test_a_name_without_a_known_ending_is_fine(folder, monkeypatch, capsys):
    for name in ("plan", "plan.v2", "plan.yml"):
        words = ["proportion", "--speeds", "1,1", "--seq-length", "64", "--num-attention-heads", "2"]
        result = call_hexi(monkeypatch, capsys, [*words, "--kv-channels", "8", "-o", name])
        assert result.code == 0
        assert Path(name).exists()
